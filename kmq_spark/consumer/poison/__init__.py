"""Isolate poison messages: deliver messages that may crash their process separately."""
