"""
How long tests wait for what is sure to come.

Rule 1: a limit bounds what hangs, on a slow machine too. No test waits it out where all is well.
Rule 2: no test passes or fails by timing: it judges what is there, not how long that took.
"""

from __future__ import annotations

COMES_S = 240.0
"""For a state: messages, a line of a log, the end of a thread."""

ENDS_S = 480.0
"""For a process to end by itself."""
