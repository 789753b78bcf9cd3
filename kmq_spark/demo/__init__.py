"""The demo: index the Python standard library through a queue, kill workers, and compare the results."""
