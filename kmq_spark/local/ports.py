"""TCP ports for servers on the loopback interface."""

from __future__ import annotations

import contextlib
import random
import socket

LOWEST, HIGHEST = 10_240, 32_767
"""
Below the ports that Linux, macOS and Windows give to outgoing connections (32768 and above).

A server with one of those ports may not get it back after a restart: while it is down, a client that tries to connect
again and again can be given that port as its own.
"""


def free_port() -> int:
    """Return a port that is free now and is given to no outgoing connection."""
    while True:
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311  # no secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
