"""The campaign's network: what a proxy passes on, and when."""

from __future__ import annotations

import socket
from contextlib import closing
from threading import Thread

from faults.proxy import Proxy
from tests.limits import COMES_S


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
                client.sendall(b"before")
                assert client.recv(1_000) == b"before"
                proxy.cut()
                client.sendall(b"during")
                assert seen == [b"before"]
                proxy.heal()
                assert client.recv(1_000) == b"during"
            thread.join(COMES_S)
    assert not thread.is_alive()
    assert seen == [b"before", b"during"]


def test_connection_to_a_port_that_is_closed_ends() -> None:
    """As it would without a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        closing(Proxy(port)) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client,
    ):
        assert client.recv(1_000) == b""
