"""Numbers for Prometheus: their names, how they come about, how they are served. Off unless a port is given."""
