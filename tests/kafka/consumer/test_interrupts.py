"""An exception in the middle of `receive`, at each of its lines: no message is lost or received twice."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

import kmq_spark
from kmq_spark.consumer import pipeline, worker
from kmq_spark.consumer.batch import Batch
from kmq_spark.core.markers import MarkerType
from tests.kafka.conftest import Queue, ack, consumer_of, covered, given_back, receive_all, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from kmq_spark.consumer.message import Message

pytestmark = pytest.mark.kafka

HOME = Path(kmq_spark.__file__).parent
FILES = {
    str(HOME / f"{name}.py")
    for name in (
        "consumer/admission", "consumer/batch", "consumer/fetcher", "consumer/handler_queue", "consumer/history",
        "consumer/leases", "consumer/marker_producer", "consumer/membership", "consumer/message", "consumer/offsets",
        "consumer/pipeline", "consumer/started", "core/ranges",
    )
}  # fmt: skip
"""Modules of receiving; the worker's are its own test's."""


class Interrupt:
    """Ctrl+C right before a line of this thread."""

    def __init__(self, step: int, files: set[str], begins: Callable[[FrameType], bool] = lambda _frame: True) -> None:
        self._left, self._files, self._begins = step, files, begins
        self._has_begun = False
        self.at = ""

    def __enter__(self) -> Self:
        """Begin."""
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        """End, whether it came or not."""
        sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> Any:  # noqa: ANN401  # as `sys.settrace` has it
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:  # noqa: ANN401  # as `sys.settrace` has it
        self._has_begun = self._has_begun or self._begins(frame)
        # The line of a `with` is run at its end, too; there Python lets no signal in before the lock is released.
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and self._has_begun and not is_with:
            self._left -= 1
            if not self._left:
                self.at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_message_is_received_once_or_redelivered_whatever_step_of_receive_is_interrupted(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, stride: int, *, is_ahead: bool
) -> None:
    """Each fifth step, and each step in `make test-slow`."""
    monkeypatch.setattr(pipeline, "QUICK_CALLS", 0 if is_ahead else 1_000_000)
    monkeypatch.setattr(pipeline, "AWAY_S", 3_600.0)
    queue.send(*map(str, range(2_500)))
    received: Counter[int] = Counter()
    places: Counter[str] = Counter()
    history: dict[int, str] = {}
    with consumer_of(queue) as consumer:
        (kept,) = receive_all(consumer, 1)
        step, was_interrupted = 1, True
        while was_interrupted:
            interrupt = Interrupt(step, FILES)
            try:
                with interrupt:
                    messages = consumer.receive(2, timeout=COMES_S)
                was_interrupted = False
            except KeyboardInterrupt:
                places[interrupt.at] += 1
                messages = []
            received.update(ack(messages))
            following = ack(receive_all(consumer, 2, max_messages=2))
            received.update(following)
            history[min(following)] = interrupt.at
            step += stride
        assert kept.is_held
        received.update(ack([kept]))
        assert consumer.in_flight_count == 0 or is_ahead
    assert len(places) > 60 // stride, places
    (position,) = queue.committed().values()
    assert received.most_common(1)[0][1] == 1
    found = {*received, *given_back(queue)}
    lost = [offset for offset in range(position) if offset not in found]
    # Where the interrupts came right before and after them.
    assert not lost, [(lost, at, place) for at, place in history.items() if abs(at - lost[0]) < 6]
    assert len(received) + len(given_back(queue)) == position
    started = [offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker)]
    assert sorted(set(started)) == list(range(position))


@pytest.mark.parametrize("step", [1, 5, 21])
def test_first_messages_of_a_partition_are_not_lost_where_their_fetch_is_interrupted(queue: Queue, step: int) -> None:
    """The group has no committed offset yet, and the consumer has not noted the first offset of the partition."""

    def has_fetched(frame: FrameType) -> bool:
        return frame.f_code.co_name == "_consume_until" and bool(frame.f_locals.get("records"))

    with consumer_of(queue) as consumer:
        assert wait_until(lambda: not consumer.receive(1) and bool(consumer._pipeline.owned))
        queue.send(*"abc")
        with pytest.raises(KeyboardInterrupt), Interrupt(step, FILES, has_fetched):
            consumer.receive(2, timeout=COMES_S)
        assert [each.value for each in receive_all(consumer, 3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("options", [{}, {"batch": 20}])
@pytest.mark.parametrize("step", [1, 40, 100, 180])
def test_message_is_handled_once_or_redelivered_whatever_step_of_run_is_interrupted(
    queue: Queue, step: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl+C interrupts the receiving thread; then another consumer takes over."""
    monkeypatch.setattr(worker, "MAX_FETCH", 20)
    queue.send(*map(str, range(300)))
    handled: list[int] = []

    def has_fetched(frame: FrameType) -> bool:
        return frame.f_code.co_name == "_consume_until" and bool(frame.f_locals.get("records"))

    def handle(given: Message | Batch) -> None:
        messages = given if isinstance(given, Batch) else [given]
        handled.extend(message.id.message_offset for message in messages)

    consumer = consumer_of(queue)
    interrupt = Interrupt(step, FILES | {str(HOME / "consumer" / "worker.py")}, has_fetched)
    with pytest.raises(KeyboardInterrupt), interrupt:
        consumer.run(handle, concurrency=2, **options)
    handled_before = set(handled)
    # Without a committed offset the next consumer skips what was started: the tracker redelivers it.
    started = {offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker)}
    skipped = started if not queue.committed() else set()
    with consumer_of(queue) as other:
        position = queue.committed().get(0, len(skipped))
        handled += ack(receive_all(other, 300 - position))
    released = {offset for each in queue.markers(MarkerType.KEEPALIVE) for offset in covered(each.marker)}
    assert len(handled) == len(set(handled))
    assert sorted({*handled, *released, *skipped}) == list(range(300)), interrupt.at
    assert not (released | skipped) & handled_before
