"""
Ask a broker whether it is ready, in three requests over plain sockets.

Rule 1: `kmq_spark.kafka` alone imports a Kafka client, so the requests are made by hand, in old, simple versions.
Rule 2: ready means that the broker lists itself (it is registered and no longer fenced, so topics can be made on it),
    and that it has a coordinator for consumer groups and for transactions. Asking for one makes their internal topics,
    in 0.3 s; the first consumer would otherwise wait 3 s for them.

Source: Kafka protocol guide, Metadata version 4, FindCoordinator version 1.
"""

from __future__ import annotations

import socket
import struct

_TIMEOUT_S = 1.0
_MAX_RESPONSE_BYTES = 1_000_000

_CLIENT_ID = b"kmq-probe"
_METADATA = (3, 4)
_FIND_COORDINATOR = (10, 1)
_NO_TOPICS = struct.pack(">ib", 0, 0)  # an empty list of topics; do not create any
_GROUP, _TRANSACTION = 0, 1
_NOT_YET = (14, 15)  # COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE; any other answer is for the clients


def is_ready(port: int) -> bool:
    """
    Tell whether a broker on the loopback serves topics, consumer groups and transactions.

    Args:
        port: TCP port on 127.0.0.1.

    Returns:
        False as long as the port is closed, silent, or the broker still at its start.
    """
    try:
        return _lists_itself(port) and _has_coordinator(port, _GROUP) and _has_coordinator(port, _TRANSACTION)
    except (OSError, EOFError, struct.error):
        return False


def _lists_itself(port: int) -> bool:
    """Tell whether the broker's metadata name a broker."""
    # correlation id, throttle time, number of brokers
    _, _, broker_count = struct.unpack_from(">iii", _ask(port, _METADATA, _NO_TOPICS))
    return bool(broker_count > 0)


def _has_coordinator(port: int, kind: int) -> bool:
    """Tell whether groups (0) or transactions (1) have a coordinator."""
    response = _ask(port, _FIND_COORDINATOR, struct.pack(">h", len(_CLIENT_ID)) + _CLIENT_ID + struct.pack(">b", kind))
    # correlation id, throttle time, error code
    _, _, error_code = struct.unpack_from(">iih", response)
    return error_code not in _NOT_YET


def _ask(port: int, api: tuple[int, int], body: bytes) -> bytes:
    """Send one request and return its response, correlation id first."""
    request = struct.pack(">hhih", *api, 1, len(_CLIENT_ID)) + _CLIENT_ID + body
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        return _read(connection, min(size, _MAX_RESPONSE_BYTES))


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly this many bytes."""
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return received
