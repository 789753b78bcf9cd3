"""Writing START, KEEPALIVE and END markers."""
