"""
A consumer process of the campaign: works off messages as its profile says, and writes down what it does.

    python -m faults.worker '<profile as JSON>'

What happens to a message depends on the seed, its id and its delivery count: a run can be repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from faults.events import EventFile
from faults.once import PROCESS, TRANSACTION
from faults.topics import results_of
from kmq_spark.consumer.consumer import QueueConsumer
from kmq_spark.errors import BatchFailed, KmqError, LeaseLostError

if TYPE_CHECKING:
    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.message import Message


NICENESS = 10

RAISED_SHARE = 0.5
"""Of the batches with failures: they are raised; the others are returned."""

KEYBOARD_SHARE = 0.5
"""Of the interrupts: KeyboardInterrupt; the others are ordinary exceptions of a signal handler."""

LONGEST_ROUND_S = 0.4
"""An interrupt comes at a random moment of this time, then the next round begins."""


@dataclass(frozen=True, slots=True)
class Profile:
    """
    What a worker does.

    Attributes:
        bootstrap_servers: Broker.
        queue: Queue.
        folder: Where its events go.
        name: Name of the worker.
        seed: Seed of its choices.
        lease_ms: Length of a lease.
        group_protocol: As of the consumer.
        logical_queue: Logical queue of the messages that it takes; empty for those of none.
        mode: `run` (handlers in threads), `batch` (handlers of batches in threads), `receive` (a loop that settles, or
            forgets), `transaction` (a loop that writes a result with each ack) or `interrupted` (a loop torn by
            exceptions of a signal handler, which it catches to receive on).
        keep_alive: Whether leases are renewed.
        threads: Handler threads.
        max_in_flight: Messages held at once.
        max_batch: Messages that `receive` returns and a batch has, at once.
        work_ms: How long a message takes.
        raised: Share of deliveries whose handler raises.
        rejected: Share of deliveries that are rejected.
        poison: Share of messages whose handler raises at every delivery.
        slow: Share of deliveries that take one and a half leases.
        forgotten: Share of deliveries that are never settled (`receive` only).
        isolate_after: As of the consumer; 0, because who forgets a third on purpose makes suspects of innocents
            (`tests/kafka/consumer/test_poison.py` tries it).
        extra: librdkafka settings.
    """

    bootstrap_servers: str
    queue: str
    folder: str
    name: str = "worker"
    seed: int = 1
    lease_ms: int = 2_000
    group_protocol: str = "consumer"
    logical_queue: str = ""
    mode: str = "run"
    keep_alive: bool = True
    threads: int = 4
    max_in_flight: int = 200
    max_batch: int = 2_000
    work_ms: int = 2
    raised: float = 0.02
    rejected: float = 0.005
    poison: float = 0.001
    slow: float = 0.002
    forgotten: float = 0.0
    isolate_after: int = 0
    extra: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the form in which a worker process gets them."""
        return json.dumps(asdict(self))


class HandlerError(Exception):
    """What a handler raises on purpose."""


class Handler:
    """
    Handles messages as the profile says.

    Args:
        profile: What to do.
        events: Where to write it down.
    """

    def __init__(self, profile: Profile, events: EventFile) -> None:
        """Keep both."""
        self._profile = profile
        self._events = events

    def __call__(self, message: Message) -> None:
        """Handle one message; returning acknowledges it."""
        profile, name = self._profile, (message.value or b"").partition(b"|")[0].decode()
        note = {"id": name, "copy": list(message.id), "delivery": message.delivery_count}
        self._events.write("delivered", **note)
        choice = random.Random(f"{profile.seed}:{name}:{message.delivery_count}").random()  # noqa: S311  # repeatable
        is_poison = random.Random(f"{profile.seed}:{name}").random() < profile.poison  # noqa: S311  # as above
        limits = [profile.raised, profile.raised + profile.rejected]
        limits.append(limits[-1] + profile.slow)
        time.sleep(profile.work_ms / 1000)
        if is_poison or choice < limits[0]:
            self._events.write("raised", **note)
            raise HandlerError(name)
        if choice < limits[1]:
            self._events.write("rejected", **note)
            message.reject("as the campaign chose")
        elif choice < limits[2]:
            time.sleep(profile.lease_ms * 1.5 / 1000)
        self._events.write("handled", **note)


class BatchHandler:
    """
    Handles the messages of a batch one after the other as the profile says, and settles them together.

    The seed chooses for each batch how it tells of failures: it returns them, or it raises `BatchFailed`.

    Args:
        profile: What to do.
        events: Where to write it down.
    """

    def __init__(self, profile: Profile, events: EventFile) -> None:
        """Keep both."""
        self._profile = profile
        self._handler = Handler(profile, events)

    def __call__(self, batch: Batch) -> dict[int, str | BaseException] | None:
        """Handle one batch; what did not fail is acknowledged."""
        failures: dict[int, str | BaseException] = {}
        for index, message in enumerate(batch):
            try:
                self._handler(message)
            except HandlerError as error:
                failures[index] = error
        first = batch[0].id.message_offset
        if failures and random.Random(f"{self._profile.seed}:{first}").random() < RAISED_SHARE:  # noqa: S311  # repeatable
            raise BatchFailed(failures)
        return failures


class ResendEvents(logging.Handler):
    """
    Notes that the consumer sends markers again because the broker did not confirm them.

    Args:
        events: Where.
    """

    def __init__(self, events: EventFile) -> None:
        """Keep the argument."""
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Note it; called with each log line of the producer of markers."""
        if getattr(record, "action", "") == "markers_resent":
            self._events.write("resent")


def main(text: str) -> None:
    """Work until SIGTERM."""
    profile = Profile(**json.loads(text))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    logging.getLogger("kmq_spark.consumer.worker").setLevel(logging.CRITICAL)  # handlers raise on purpose
    events = EventFile(Path(profile.folder), f"{profile.name}-{os.getpid()}")
    logging.getLogger("kmq_spark.consumer.marker_producer").addHandler(ResendEvents(events))
    consumer = QueueConsumer(
        profile.queue,
        bootstrap_servers=profile.bootstrap_servers,
        logical_queue=profile.logical_queue,
        lease=profile.lease_ms / 1000,
        max_lease=None if profile.keep_alive else profile.lease_ms / 1000,
        max_in_flight=profile.max_in_flight,
        isolate_after=profile.isolate_after,
        extra={"group.protocol": profile.group_protocol, **profile.extra},
    )
    # They share the machine with the tracker and the broker, which in production they do not.
    os.nice(NICENESS)
    stopping: list[int] = []

    def end(number: int, _frame: object) -> None:
        stopping.append(number)
        consumer.stop()

    signal.signal(signal.SIGTERM, end)
    # From here on it may be asked to end: before, the signal would kill it.
    events.write("began", queue=profile.logical_queue, mode=profile.mode, isolate_after=profile.isolate_after)
    if profile.mode == "run":
        handler = Handler(profile, events)
        consumer.run(handler, concurrency=profile.threads)
    elif profile.mode == "batch":
        batches = BatchHandler(profile, events)
        consumer.run(batches, batch=min(profile.max_batch, profile.max_in_flight), concurrency=profile.threads)
    elif profile.mode == "receive":
        _receive(consumer, profile, events, stopping)
    elif profile.mode == TRANSACTION:
        _receive_in_transactions(consumer, profile, events, stopping)
    else:
        _receive_interrupted(consumer, profile, events, stopping)
    events.write("ended")


def _receive(consumer: QueueConsumer, profile: Profile, events: EventFile, stopping: list[int]) -> None:
    """Settle most messages and forget some, until SIGTERM."""
    generator = random.Random(profile.seed)  # noqa: S311  # repeatable
    with consumer:
        while not stopping:
            for message in _received(consumer, min(profile.max_batch, profile.max_in_flight)):
                name = (message.value or b"").partition(b"|")[0].decode()
                note = {"id": name, "copy": list(message.id), "delivery": message.delivery_count}
                events.write("delivered", **note)
                if not message.is_settled and generator.random() >= profile.forgotten:
                    events.write("handled", **note)
                    # A process that was starved may have lost the lease: its message comes again.
                    with contextlib.suppress(LeaseLostError):
                        message.ack()
            events.write("held", count=consumer.in_flight_count)
            time.sleep(profile.work_ms / 1000)


def _receive_in_transactions(consumer: QueueConsumer, profile: Profile, events: EventFile, stopping: list[int]) -> None:
    """Write a result for each message, and ack them together, until SIGTERM."""
    results, headers = results_of(profile.queue), {PROCESS: str(os.getpid())}
    with consumer:
        while not stopping:
            held = _received(consumer, profile.max_in_flight)
            for message in held:
                _note(message, events)
            time.sleep(profile.work_ms / 1000)
            try:
                if held:
                    with consumer.transaction() as tx:
                        for message in held:
                            tx.send(results, message.value, key=message.id.text, headers=headers)
                            tx.ack(message)
            except KmqError as error:
                if not (error.retriable or isinstance(error, LeaseLostError)):
                    raise
                logging.getLogger(__name__).warning("a transaction failed, its messages come again: %s", error)
                _release(held)


def _release(held: list[Message]) -> None:
    for message in held:
        with contextlib.suppress(KmqError):
            if not message.is_settled:
                message.release()


class AlarmError(Exception):
    """What the signal handler raises."""


def _receive_interrupted(consumer: QueueConsumer, profile: Profile, events: EventFile, stopping: list[int]) -> None:
    """
    Receive and acknowledge, torn at random moments, until SIGTERM.

    Each round arms one signal. Its handler raises wherever the main thread is at that moment: a KeyboardInterrupt, as
    Ctrl+C does, or an exception of its own, as a time limit does. The loop catches it, gives back what it has in its
    hands, and receives on, as a shell, a notebook or a task runner would.
    """
    generator = random.Random(profile.seed)  # noqa: S311  # repeatable

    def tear(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt if generator.random() < KEYBOARD_SHARE else AlarmError

    signal.signal(signal.SIGALRM, tear)
    with consumer:
        while not stopping:
            held: list[Message] = []
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.001, LONGEST_ROUND_S))
                while True:
                    held = _received(consumer, profile.max_in_flight)
                    _settle(held, events)
            except (KeyboardInterrupt, AlarmError) as error:
                events.write("interrupted", by=type(error).__name__, held=len(held))
                for message in held:
                    if not message.is_settled:
                        message.release()


def _settle(messages: list[Message], events: EventFile) -> None:
    for message in messages:
        _note(message, events)
        message.ack()


def _note(message: Message, events: EventFile) -> None:
    """Write down that a message was given and handled."""
    name = (message.value or b"").partition(b"|")[0].decode()
    note = {"id": name, "copy": list(message.id), "delivery": message.delivery_count}
    events.write("delivered", **note)
    events.write("handled", **note)


def _received(consumer: QueueConsumer, max_messages: int) -> list[Message]:
    """Receive once; what passes by itself, as a broker that restarts does, is tried again."""
    try:
        return consumer.receive(max_messages, timeout=0.2)
    except KmqError as error:
        if not error.retriable:
            raise
        logging.getLogger(__name__).warning("receive failed, retrying: %s", error)
        time.sleep(0.2)
        return []


if __name__ == "__main__":
    main(sys.argv[1])
