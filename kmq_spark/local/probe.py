"""
A free port for a broker, and whether the broker is ready: three requests over sockets.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

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
_COORDINATORS = (0, 1)  # of consumer groups, of transactions
_NOT_YET = (14, 15)  # COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE; any other answer is for the clients


def free_port() -> int:
    """Return a port that is free now and is given to no outgoing connection."""
    while True:
        port = random.randint(LOWEST, HIGHEST)  # noqa: S311  # no secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def is_ready(port: int, node_id: int = 1, tls: ssl.SSLContext | None = None) -> bool:
    """Return whether a broker on this loopback port serves topics, consumer groups and transactions."""
    try:
        return node_id in _brokers(port, tls) and all(_has_coordinator(port, tls, kind) for kind in _COORDINATORS)
    except (OSError, EOFError, struct.error):
        return False


def _brokers(port: int, tls: ssl.SSLContext | None) -> set[int]:
    """Return the node ids in the broker's metadata."""
    response = _ask(port, tls, _METADATA, _NO_TOPICS)
    # correlation id, throttle time, number of brokers
    _, _, count = struct.unpack_from(">iii", response)
    found, at = set(), 12
    for _ in range(count):
        node_id, host_size = struct.unpack_from(">ih", response, at)
        (rack_size,) = struct.unpack_from(">h", response, at + 6 + host_size + 4)
        at += 6 + host_size + 4 + 2 + max(rack_size, 0)
        found.add(node_id)
    return found


def _has_coordinator(port: int, tls: ssl.SSLContext | None, kind: int) -> bool:
    """Return whether consumer groups (0) or transactions (1) have a coordinator."""
    body = struct.pack(">h", len(_CLIENT_ID)) + _CLIENT_ID + struct.pack(">b", kind)
    # correlation id, throttle time, error code
    _, _, error_code = struct.unpack_from(">iih", _ask(port, tls, _FIND_COORDINATOR, body))
    return error_code not in _NOT_YET


def _ask(port: int, tls: ssl.SSLContext | None, api: tuple[int, int], body: bytes) -> bytes:
    """Send one request and return its response, which begins with the correlation id."""
    request = struct.pack(">hhih", *api, 1, len(_CLIENT_ID)) + _CLIENT_ID + body
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection, server_hostname="127.0.0.1"))
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
