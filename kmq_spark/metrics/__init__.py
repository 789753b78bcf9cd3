"""Prometheus metrics: their names, their values and their HTTP server. They are off unless a port is set."""
