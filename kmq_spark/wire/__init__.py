"""Bytes of the log and values of the core: marker records and the headers of messages."""
