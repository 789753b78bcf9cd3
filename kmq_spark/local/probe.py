"""
A free port for a broker, and whether the broker is ready: three requests over plain sockets.

Rule 1: only `kmq_spark.kafka` imports a Kafka client, so this module encodes the requests itself, in old, simple
    versions.
Rule 2: ready means two things. The broker lists itself in its metadata: it is registered and no longer fenced, so
    topics can be created. And it has coordinators for consumer groups and transactions. The FindCoordinator request
    creates their internal topics in 0.3 s; otherwise the first consumer would wait 3 s for them.

Source: Kafka protocol guide, Metadata version 4, FindCoordinator version 1.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct

LOWEST, HIGHEST = 10_240, 32_767
"""
Below the ports that Linux, macOS and Windows give to outgoing connections (32768 and above).

A server with one of those ports may not get it back after a restart: while it is down, a client that tries to connect
again and again can be given that port as its own.
"""

_TIMEOUT_S = 1.0
_MAX_RESPONSE_BYTES = 1_000_000

_CLIENT_ID = b"kmq-probe"
_METADATA = (3, 4)
_FIND_COORDINATOR = (10, 1)
_NO_TOPICS = struct.pack(">ib", 0, 0)  # an empty list of topics; do not create any
_GROUP, _TRANSACTION = 0, 1
_NOT_YET = (14, 15)  # COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE; any other answer is for the clients


def free_port() -> int:
    """Return a port that is free now and is given to no outgoing connection."""
    while True:
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311  # no secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def is_ready(port: int) -> bool:
    """Return whether a broker on this loopback port serves topics, consumer groups and transactions."""
    try:
        return _lists_itself(port) and _has_coordinator(port, _GROUP) and _has_coordinator(port, _TRANSACTION)
    except (OSError, EOFError, struct.error):
        return False


def _lists_itself(port: int) -> bool:
    """Return whether the broker's metadata list a broker."""
    # correlation id, throttle time, number of brokers
    _, _, broker_count = struct.unpack_from(">iii", _ask(port, _METADATA, _NO_TOPICS))
    return bool(broker_count > 0)


def _has_coordinator(port: int, kind: int) -> bool:
    """Return whether consumer groups (0) or transactions (1) have a coordinator."""
    response = _ask(port, _FIND_COORDINATOR, struct.pack(">h", len(_CLIENT_ID)) + _CLIENT_ID + struct.pack(">b", kind))
    # correlation id, throttle time, error code
    _, _, error_code = struct.unpack_from(">iih", response)
    return error_code not in _NOT_YET


def _ask(port: int, api: tuple[int, int], body: bytes) -> bytes:
    """Send one request and return its response, which begins with the correlation id."""
    request = struct.pack(">hhih", *api, 1, len(_CLIENT_ID)) + _CLIENT_ID + body
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        return _read(connection, min(size, _MAX_RESPONSE_BYTES))


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly *size* bytes."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return received
