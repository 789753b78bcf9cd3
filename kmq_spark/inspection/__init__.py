"""Inspect a queue without changing it: read its topics and find problems. Only plain values go in and come out."""
