"""Batches: `receive_batch` and `run(handler, batch=…)` settle the messages named. Nothing is lost or repeated."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark import BatchFailed
from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.errors import UsageError
from tests.kafka.conftest import Queue, consumer_of, covered, ended, read_all, receive_all, track, wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kmq_spark.consumer.batch import Batch
    from kmq_spark.consumer.consumer import QueueConsumer
    from kmq_spark.consumer.worker import RunSummary

pytestmark = pytest.mark.kafka


def receive(consumer: QueueConsumer, count: int, **options: Any) -> Batch:
    """Receive one batch that has *count* messages; what comes earlier in smaller ones is a failure."""
    until = time.monotonic() + COMES_S
    while time.monotonic() < until:
        batch = consumer.receive_batch(count, timeout=0.5, **options)
        if batch:
            assert len(batch) == count
            return batch
    raise AssertionError("no batch came")


def drained(queue: Queue, **options: Any) -> Counter[bytes]:
    """Acknowledge what comes until the topic is read to its end; return the values."""
    found: Counter[bytes] = Counter()
    end = {record.partition(): record.offset() + 1 for record in read_all(queue.bootstrap_servers, queue.name)}
    with consumer_of(queue, **options) as consumer:
        # A position is committed before its messages are handed out.
        assert wait_until(
            lambda: (
                _count(consumer.receive_batch(timeout=0.2), found)
                and all(queue.committed().get(partition, 0) >= offset for partition, offset in end.items())
            ),
            COMES_S,
        )
    return found


def _count(batch: Batch, found: Counter[bytes]) -> bool:
    found.update(value or b"" for value in batch.values())
    batch.ack()
    return True


def run(queue: Queue, handler: Callable[[Batch], Any], count: int, **options: Any) -> RunSummary:  # passed through
    """Run a handler of batches until it was given *count* messages, at most `COMES_S`."""
    consumer = consumer_of(queue, **options.pop("consumer", {}))
    given: list[int] = []

    def counting(batch: Batch) -> Any:  # noqa: ANN401  # of any type
        given.append(len(batch))
        if sum(given) >= count:
            consumer.stop()
        return handler(batch)

    timer = threading.Timer(COMES_S, consumer.stop)
    timer.start()
    try:
        return consumer.run(counting, **{"batch": 100, "concurrency": 1, **options})
    finally:
        timer.cancel()
        assert sum(given) >= count


def test_whole_batch_is_one_start_and_one_end_of_each_partition_and_nothing_comes_again(
    make_queue: Callable[..., Queue],
) -> None:
    queue = make_queue(2)
    queue.send(*map(str, range(300)))
    with consumer_of(queue) as consumer:
        found: list[bytes | None] = []
        batches = 0
        while len(found) < 300:
            batch = consumer.receive_batch(timeout=5)
            found += batch.values()
            batches += bool(batch)
            assert batch._made == {}
            batch.ack()
            consumer.flush()
    assert Counter(found) == Counter(str(number).encode() for number in range(300))
    assert len(queue.markers(MarkerType.START)) <= 2 * batches
    assert len(queue.markers(MarkerType.END)) == len(queue.markers(MarkerType.START))
    track(queue)
    assert drained(queue) == {}


def test_handler_that_returns_acknowledges_the_batch(queue: Queue) -> None:
    queue.send(*map(str, range(250)))
    sizes: list[int] = []
    summary = run(queue, lambda batch: sizes.append(len(batch)), 250, batch_wait=2)
    assert (summary.acked, summary.failed) == (250, 0)
    # Whole batches: the handlers wait for them for `batch_wait`.
    assert sizes == [100, 100, 50]
    assert len(queue.markers(MarkerType.START)) == 3
    assert ended(queue, Outcome.ACKED) == list(range(250))
    assert queue.committed() == {0: 250}


def test_handler_that_raises_releases_what_it_has_not_settled(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    queue.send(*"abcd")

    def handler(batch: Batch) -> None:
        batch.ack([0])
        batch[1].reject("bad")
        raise RuntimeError("no database")

    summary = run(queue, handler, 4)
    assert (summary.acked, summary.rejected, summary.released, summary.failed) == (1, 1, 2, 1)
    assert "RuntimeError: no database" in caplog.text
    (release,) = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    assert (covered(release), release.redeliver_after_ms) == ([2, 3], 0)
    assert release.reason == "RuntimeError: no database"
    assert not release.never_handed_out


@pytest.mark.parametrize("is_raised", [True, False])
def test_failures_of_a_handler_are_released_and_the_others_acknowledged(queue: Queue, *, is_raised: bool) -> None:
    queue.send(*"abcd")

    def handler(batch: Batch) -> dict[int, str | BaseException] | None:
        failures: dict[int, str | BaseException] = {1: ValueError("no stock"), 3: "no address"}
        if is_raised:
            raise BatchFailed(failures)
        return failures if batch[1].value == b"b" else None

    summary = run(queue, handler, 4)
    assert (summary.acked, summary.released, summary.failed) == (2, 2, int(is_raised))
    assert ended(queue, Outcome.ACKED) == [0, 2]
    track(queue)
    assert drained(queue) == {b"b": 1, b"d": 1}


def test_failures_that_cannot_be_read_acknowledge_nothing(queue: Queue) -> None:
    queue.send(*"ab")
    summary = run(queue, lambda _batch: {9: "no such index"}, 2)
    assert (summary.acked, summary.released, summary.failed) == (0, 2, 1)
    assert ended(queue, Outcome.ACKED) == []


def test_result_that_is_no_mapping_ends_the_run_and_gives_the_batch_back(queue: Queue) -> None:
    queue.send(*"ab")
    with pytest.raises(UsageError, match="handler of batches returned a wrong type: got list"):
        run(queue, lambda _batch: [1], 2)
    (release,) = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    assert (covered(release), release.never_handed_out) == ([0, 1], True)


def test_drain_gives_unseen_batches_back_uncounted(queue: Queue) -> None:
    queue.send(*map(str, range(40)))
    consumer = consumer_of(queue)

    def handler(_batch: Batch) -> None:
        threading.Timer(0.5, consumer.stop).start()
        time.sleep(1.5)

    summary = consumer.run(handler, batch=10, batch_wait=1, concurrency=1)
    assert summary.acked == 10
    releases = [each.marker for each in queue.markers(MarkerType.KEEPALIVE)]
    assert all(release.never_handed_out for release in releases)
    given_back = [offset for release in releases for offset in covered(release)]
    assert len(given_back) == summary.unseen
    track(queue)
    assert sum(drained(queue).values()) == 30


def test_batch_is_acknowledged_with_results_in_a_transaction(queue: Queue, results: Queue) -> None:
    queue.send(*"abc")
    with consumer_of(queue) as consumer:
        batch = receive(consumer, 3)
        batch.reject({2: "bad"})
        with consumer.transaction() as tx:
            tx.send(results.name, b"|".join(value or b"" for value in batch.values()[:2]))
            tx.ack(batch)
        batch.ack()
        assert [message.settled_by for message in batch] == ["ack", "ack", "reject"]
    assert (ended(queue, Outcome.ACKED), ended(queue, Outcome.REJECTED)) == ([0, 1], [2])
    assert drained(results) == {b"a|b": 1}


def test_record_that_comes_with_an_answer_does_not_make_the_next_batch_small(queue: Queue) -> None:
    """A consumer that waits for answers between its batches, as transactions do, got one message a call."""
    queue.send(*map(str, range(100)))
    with consumer_of(queue) as consumer:
        receive_all(consumer, 1)
        fetcher = consumer._pipeline._fetcher
        fetcher.reseek({})  # what came with the answer to the first commit is fetched again

        def a_record_came() -> bool:
            if not fetcher._buffer:
                fetcher.serve_answers()
            return bool(fetcher._buffer)

        assert wait_until(a_record_came)
        assert len(consumer.receive(50, timeout=5)) == 50
