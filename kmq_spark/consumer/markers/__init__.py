"""Write START, KEEPALIVE and END markers."""
