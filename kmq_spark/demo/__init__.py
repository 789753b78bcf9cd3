"""The demo: index the Python standard library through a queue whose workers are killed, and count what came out."""
