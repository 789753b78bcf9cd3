"""The world of a coordination group: records in, members, claims, tasks and positions out; no clock, no I/O."""
