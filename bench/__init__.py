"""Benchmarks: run with `python -m bench.<name>`; `make bench` runs them all."""
