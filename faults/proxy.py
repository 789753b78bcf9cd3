"""
A TCP proxy in front of a broker that cuts the network, delays it and loses answers, and a broker behind two of them.

Rule 1: a cut loses nothing that TCP would not deliver later: connections stay open, nothing passes, and what was on its
way passes when the cut has ended. New connections get no answer meanwhile.
Rule 2: a delay is latency alone. Frames follow each other on their way, so that it takes no throughput.
Rule 3: it passes whole requests and answers of Kafka: four bytes of size, then as many.
Rule 4: a lost answer is one that the broker has given: what was asked for is done, and who asked loses the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from faults.campaign import BROKER_SETTINGS
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

BUFFER_BYTES = 2**20
MOST_FRAMES = 64
"""On their way in one direction of a connection."""

TRANSACTIONAL = {
    "Produce": 0, "InitProducerId": 22, "AddPartitionsToTxn": 24, "AddOffsetsToTxn": 25, "EndTxn": 26,
    "TxnOffsetCommit": 28,
}  # fmt: skip
"""Kafka's numbers of the requests of a transaction."""


class Connection:
    """One connection: the number of the request whose answer is to be lost, once it was seen."""

    losing = b""


class Proxy:
    """Passes connections to a port of its own, on 127.0.0.1, on to port *target* of this machine."""

    def __init__(self, target: int) -> None:
        self.target, self._delay_s = target, 0.0
        self._losing, self.lost_count = -1, 0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=BUFFER_BYTES)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Bootstrap address for clients."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._loop.call_soon_threadsafe(self._passing.clear)

    def heal(self) -> None:
        """Let everything pass again."""
        self._loop.call_soon_threadsafe(self._passing.set)

    def delay(self, seconds: float) -> None:
        """Delay every frame by *seconds* from now on, in both directions."""
        self._delay_s = seconds

    def lose_answer(self, kind: str) -> None:
        """Lose the answer to the next request of this kind, one of `TRANSACTIONAL`, and its connection with it."""
        self._losing = TRANSACTIONAL[kind]

    def close(self) -> None:
        """Close all connections and the port."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        # Sockets are closed in the loop's next turn.
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self._passing.wait()
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target, limit=BUFFER_BYTES)
        except OSError:
            writer.close()
            self._writers.discard(writer)
            return
        self._writers.add(there[1])
        connection = Connection()
        await asyncio.gather(
            self._pass(reader, there[1], partial(self._request, connection)),
            self._pass(there[0], writer, partial(self._answer, connection)),
        )
        self._writers -= {writer, there[1]}

    def _request(self, connection: Connection, request: bytes) -> bytes:
        """Return what is passed on of a request, as long as it was. It begins with kind, version and number."""
        if int.from_bytes(request[:2]) == self._losing and not connection.losing:
            self._losing, connection.losing = -1, request[4:8]
        return request

    def _answer(self, connection: Connection, answer: bytes) -> bytes:
        """Return what is passed on of an answer, as long as it was; it begins with the number of its request."""
        is_lost = answer[:4] == connection.losing
        self.lost_count += is_lost
        return b"" if is_lost else answer

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[bytes], bytes]
    ) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_FRAMES)
        await asyncio.gather(self._receive(reader, waiting, passed), self._send(waiting, writer))

    async def _receive(
        self,
        reader: asyncio.StreamReader,
        waiting: asyncio.Queue[tuple[float, bytes]],
        passed: Callable[[bytes], bytes],
    ) -> None:
        """Queue each frame with the time at which it is due; an empty one is the end of the stream."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                frame = passed(await reader.readexactly(int.from_bytes(size)))
                if not frame:
                    break
                await waiting.put((self._loop.time() + self._delay_s, size + frame))
        await waiting.put((self._loop.time() + self._delay_s, b""))

    async def _send(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        """Pass each frame on when it is due. A delayed frame does not delay the next one further."""
        while True:
            due_s, data = await waiting.get()
            if not data:
                writer.close()
                return
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await self._passing.wait()
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                # The other side has gone. The rest is read, so that the end comes.
                writer.close()


class ProxiedBroker(NamedTuple):
    """A broker, and the proxies through which workers and trackers reach it."""

    broker: EmbeddedBroker
    workers: Proxy
    trackers: Proxy

    @classmethod
    def start(cls, folder: Path, environment: Mapping[str, str] | None = None) -> ProxiedBroker:
        """Start them; the broker keeps its data in *folder*."""
        data = folder / f"proxied-broker-{time.time_ns()}"
        data.mkdir(parents=True)
        ours, to_workers, to_trackers, controller = (free_port() for _ in range(4))
        (data / "controller.port").write_text(str(controller))
        workers, trackers = Proxy(to_workers), Proxy(to_trackers)
        # Clients go on to the address that the broker names for the port on which they asked.
        listeners = {"PLAINTEXT": ours, "WORKERS": to_workers, "TRACKERS": to_trackers}
        names = {"PLAINTEXT": ours, "WORKERS": workers.port, "TRACKERS": trackers.port}
        extra = BROKER_SETTINGS | {
            "listeners": _listed(listeners | {"CONTROLLER": controller}),
            "advertised.listeners": _listed(names),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in (*listeners, "CONTROLLER")),
            "inter.broker.listener.name": "PLAINTEXT",
        }
        return cls(EmbeddedBroker(data, ours, extra, environment).start(), workers, trackers)


def _listed(ports: dict[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
