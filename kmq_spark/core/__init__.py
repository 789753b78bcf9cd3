"""The rules of the queue as pure functions: standard library and numpy only, no clock and no I/O."""
