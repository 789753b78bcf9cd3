"""The campaign's network: what a proxy passes on, and when."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
from threading import Thread

from faults.proxy import Proxy
from tests.limits import COMES_S

BEFORE, DURING = b"\0\0\0\6before", b"\0\0\0\6during"
"""Four bytes of size, as Kafka's requests and answers have."""


def echo(server: socket.socket, seen: list[bytes]) -> None:
    """Answer one connection with what it sends, until it ends."""
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1_000):
            seen.append(data)
            connection.sendall(data)


def test_what_is_sent_during_a_cut_arrives_after_it() -> None:
    """Nothing is lost, and nothing passes before."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=echo, args=(server, seen))
        thread.start()
        with closing(Proxy(server.getsockname()[1])) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
                client.sendall(BEFORE)
                assert client.recv(1_000) == BEFORE
                proxy.cut()
                client.sendall(DURING)
                assert seen == [BEFORE]
                proxy.heal()
                assert client.recv(1_000) == DURING
            thread.join(COMES_S)
    assert not thread.is_alive()
    assert seen == [BEFORE, DURING]


def test_connection_to_a_port_that_is_closed_ends() -> None:
    """As it would without a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        closing(Proxy(port)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
    ):
        assert client.recv(1_000) == b""


def test_answer_that_is_lost_was_given_and_ends_the_connection() -> None:
    """The number of the request tells its answer from those before it."""
    end_txn, other = struct.pack(">ihhi", 8, 26, 0, 7), struct.pack(">ihhi", 8, 3, 0, 6)
    answers = struct.pack(">ii", 4, 6), struct.pack(">ii", 4, 7)
    seen: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            for answer in answers:
                seen.append(connection.recv(12))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server, closing(Proxy(server.getsockname()[1])) as proxy:
        thread = Thread(target=serve)
        thread.start()
        proxy.lose_answer("EndTxn")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
            client.sendall(other + end_txn)
            assert client.recv(1_000) == answers[0]
            assert client.recv(1_000) == b""
        thread.join(COMES_S)
    assert (seen, proxy.lost_count) == ([other, end_txn], 1)
