"""Handing out messages that may kill their process one at a time."""
