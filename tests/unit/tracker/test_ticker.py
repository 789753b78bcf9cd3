"""The ticker: when a partition gets a TICK, on librdkafka's own mock broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition

from kmq_spark.core.decisions import DECISION_DTYPES, Decisions
from kmq_spark.core.markers import MarkerType
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.state import Status
from kmq_spark.errors import KafkaClientError
from kmq_spark.tracker.ticker import Ticker
from kmq_spark.wire.codec import decode_marker
from tests.limits import COMES_S
from tests.unit.mock_broker import PARTITIONS, mock_broker

if TYPE_CHECKING:
    from confluent_kafka import Message

TOPIC = "orders.markers"
BROKER_MS = 1_234
"""The mock broker's clock, at every append: far from ours, so a ticker that looked at its own would be found out."""


class Log:
    """A markers topic on a mock broker, with what a ticker has written to it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._reader = Consumer({"bootstrap.servers": address, "group.id": "test", "fetch.wait.max.ms": 5})
        places = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        for place in places:
            place.offset = self._reader.get_watermark_offsets(place, timeout=5)[1]
        self._reader.assign(places)
        self.ticks: list[Message] = []
        self._tickers: list[Ticker] = []

    def wait(self, count: int, timeout_s: float = COMES_S) -> list[int]:
        """Wait for *count* TICKs in all; return the partitions of all there are."""
        until = time.monotonic() + timeout_s
        while len(self.ticks) < count and time.monotonic() < until:
            record = self._reader.poll(0.05)
            if record is not None and record.error() is None:
                assert decode_marker(record.value()).type is MarkerType.TICK
                self.ticks.append(record)
        return [record.partition() or 0 for record in self.ticks]

    def rests(self, seconds: float) -> bool:
        """Return whether nothing is written for some seconds."""
        before = len(self.ticks)
        return len(self.wait(before + 1, seconds)) == before

    def make(self, interval_s: float = 0.05, partitions: int = PARTITIONS, address: str = "", **config: int) -> Ticker:
        """Return a ticker that ends with the test."""
        address = address or self._address
        settings: dict[str, str | int] = {"bootstrap.servers": address, "log_level": 0, "linger.ms": 0, **config}
        self._tickers.append(Ticker(settings, TOPIC, partitions, interval_s))
        return self._tickers[-1]

    def start(self, interval_s: float = 0.05) -> Ticker:
        """Return a ticker that knows the broker's clock and has written its first TICKs."""
        ticker = self.make(interval_s)
        ticker.start()
        ticker.wait_first_ticks(COMES_S)
        self.wait(PARTITIONS)
        return ticker

    def close(self) -> None:
        """Stop the tickers and leave the broker."""
        for ticker in self._tickers:
            ticker.stop()
        self._reader.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the mock broker is."""
    with mock_broker(TOPIC) as address:
        yield address


@pytest.fixture
def log(address: str) -> Iterator[Log]:
    """Return a log that begins where this test does."""
    log = Log(address)
    yield log
    log.close()


def standing(
    partition: int,
    *,
    in_flight: int = 1,
    deadline_at_ms: int | None = None,
    read_to: int = 1,
    clock_ms: int = 1,
    behind_ms: int = 0,
) -> PartitionOutcome:
    """Return where a partition stands after a batch."""
    status = Status(read_to, clock_ms, in_flight, 0, deadline_at_ms, {}, behind_ms=behind_ms)
    return PartitionOutcome(partition, status, Decisions.empty())


def test_starting_ticker_ticks_every_partition_once_and_then_rests(log: Log) -> None:
    log.start()
    assert sorted(log.wait(PARTITIONS)) == list(range(PARTITIONS))
    assert log.rests(0.3)


def test_tick_is_aimed_just_past_the_deadline(log: Log) -> None:
    """Not before it, when nothing would be due."""
    began_at = time.monotonic()
    ticker = log.start()
    ticker.observe([standing(2, deadline_at_ms=BROKER_MS + 400)])
    assert log.wait(PARTITIONS + 1)[PARTITIONS:] == [2]
    assert time.monotonic() - began_at > 0.4


def test_overdue_partition_ticks_each_interval_and_no_oftener(log: Log) -> None:
    ticker = log.start(interval_s=0.1)
    ticker.observe([standing(1, deadline_at_ms=BROKER_MS - 1_000)])
    began_at = time.monotonic()
    log.wait(PARTITIONS + 4)
    assert time.monotonic() - began_at > 0.25  # four TICKs, three rests of 100 ms between them
    ticker.observe([standing(1, in_flight=0)])
    log.wait(10_000, 0.15)
    assert log.rests(0.3)


def test_rejected_message_is_due_at_once(log: Log) -> None:
    """Its deadline is -1: due at the next TICK, so there must be one."""
    ticker = log.start()
    ticker.observe([standing(3, deadline_at_ms=-1)])
    assert log.wait(PARTITIONS + 1)[PARTITIONS] == 3


def test_end_of_a_batch_lets_what_is_due_tick_before_its_interval(log: Log) -> None:
    """The next batch is about to look for markers: a TICK that waits out its interval would wait for one more batch."""
    ticker = log.start(interval_s=60)
    ticker.observe([standing(0, deadline_at_ms=BROKER_MS - 1)])
    assert log.rests(0.3)
    ticker.batch_ends()
    assert log.wait(PARTITIONS + 1)[PARTITIONS:] == [0]


@pytest.mark.parametrize(("decided", "in_flight", "ticks"), [(5_000, 1, 1), (0, 20_000, 2)])
def test_flooded_partition_gets_a_tick_or_two_until_its_batch_ends_and_as_many_behind_it(
    log: Log, decided: int, in_flight: int, ticks: int
) -> None:
    """What is decided while it is sent is all in the next batch: a mass expiry must not become one batch of minutes."""
    columns = {**{name: [0, 0] for name in DECISION_DTYPES}, "message_count": [1, decided - 1]}
    decisions = Decisions.from_columns(columns, ["", ""]) if decided else Decisions.empty()
    ticker = log.start(interval_s=0.02)
    many = replace(standing(1, deadline_at_ms=BROKER_MS - 1_000, in_flight=in_flight), decisions=decisions)
    ticker.observe([many])
    assert log.wait(PARTITIONS + ticks)[PARTITIONS:] == [1] * ticks
    assert log.rests(0.3)
    ticker.batch_ends()
    assert log.wait(PARTITIONS + 2 * ticks)[PARTITIONS:] == [1] * 2 * ticks
    assert log.rests(0.3)


def test_partition_with_little_in_flight_gets_its_ticks_while_batches_take_their_time(log: Log) -> None:
    """Batches may be far apart on purpose : the last TICK before one says what is due."""
    ticker = log.start(interval_s=0.02)
    ticker.observe([standing(1, deadline_at_ms=BROKER_MS - 1_000, in_flight=19_999)])
    assert log.wait(PARTITIONS + 5)[PARTITIONS:] == [1] * 5


def test_partition_whose_clock_is_ahead_is_ticked_although_nothing_is_due(log: Log) -> None:
    """Time passes there from record to record alone; however long the interval, and however many TICKs a batch had."""
    ticker = log.start(interval_s=60)
    hour_ms = 3_600_000
    behind = standing(1, deadline_at_ms=BROKER_MS + hour_ms, clock_ms=BROKER_MS + hour_ms, behind_ms=hour_ms)
    few_ms = standing(2, deadline_at_ms=BROKER_MS + hour_ms, clock_ms=BROKER_MS + 20, behind_ms=20)
    nothing = standing(3, in_flight=0, clock_ms=BROKER_MS + hour_ms, behind_ms=hour_ms)
    ticker.observe([replace(behind, status=replace(behind.status, in_flight=20_000)), few_ms, nothing])
    assert log.wait(PARTITIONS + 4)[PARTITIONS:] == [1] * 4


def test_append_time_of_what_was_read_moves_the_believed_clock_forward(log: Log) -> None:
    """The broker's clock was set forward while nothing was in flight: a lease must not wait for the old one."""
    ticker = log.start()
    later_ms = BROKER_MS + 3_600_000
    ticker.observe([standing(1, deadline_at_ms=later_ms + 300, clock_ms=later_ms)])
    assert log.wait(PARTITIONS + 1)[PARTITIONS:] == [1]


def test_rest_lasts_while_nothing_is_due_and_ends_with_the_next_tick(log: Log) -> None:
    """A batch between two TICKs decides nothing; one that begins at a TICK is not late."""
    ticker = log.start()
    read_all = [standing(each, read_to=10**9, deadline_at_ms=None) for each in range(PARTITIONS)]
    ticker.observe(read_all)
    assert seconds_of_pause(ticker, 0.3) >= 0.3
    read_to = (log.ticks[-1].offset() or 0) + 1
    ticker.observe([standing(each, read_to=read_to, deadline_at_ms=BROKER_MS + 200) for each in range(PARTITIONS)])
    ticker.pause(3_600)  # ends: else it outlasts the time of this test


def test_batch_that_has_not_read_the_newest_tick_is_followed_by_no_rest(log: Log) -> None:
    ticker = log.start()
    newest = max(tick.offset() or 0 for tick in log.ticks)
    ticker.observe([standing(each, read_to=newest) for each in range(PARTITIONS)])
    ticker.pause(3_600)  # ends: else it outlasts the time of this test


def test_deadline_that_no_batch_knows_gets_its_tick_and_ends_the_pause(log: Log) -> None:
    """A marker that Spark has not read may be due before all others."""
    ticker = log.start()
    read_to = {tick.partition(): (tick.offset() or 0) + 1 for tick in log.ticks}
    far_ms = BROKER_MS + 3_600_000
    ticker.observe([standing(each, read_to=read_to[each], deadline_at_ms=far_ms) for each in (0, 1)])
    ticker.observe([standing(each, read_to=read_to[each], in_flight=0) for each in (2, 3)])
    assert not ticker.pause(0.2)
    assert 3_000 < ticker.due_in_s() < 3_600
    ticker.expect(1, BROKER_MS - 1)
    assert ticker.due_in_s() < 0
    ticker.expect(2, BROKER_MS - 1)  # nothing was in flight there
    ticker.expect(1, far_ms)  # the earlier one counts
    assert ticker.pause(3_600)
    assert sorted(set(log.wait(PARTITIONS + 2)[PARTITIONS:])) == [1, 2]


def test_stop_ends_pauses(log: Log) -> None:
    """Those of a query that is being stopped, while TICKs are still written."""
    ticker = log.start()
    ticker.observe([standing(each, read_to=10**9) for each in range(PARTITIONS)])
    assert not ticker.pause(0.1)
    ender = threading.Timer(0.2, ticker.end_pauses)
    ender.start()
    assert ticker.pause(3_600)
    assert ticker.pause(3_600)
    assert ticker.is_alive()
    ender.join()


def seconds_of_pause(ticker: Ticker, longest_s: float) -> float:
    """Return how long a rest lasts."""
    began_at = time.monotonic()
    ticker.pause(longest_s)
    return time.monotonic() - began_at


def test_partition_that_came_later_is_ticked_too(log: Log) -> None:
    ticker = log.make(partitions=2)
    ticker.start()
    assert sorted(log.wait(2)) == [0, 1]
    ticker.observe([standing(3, deadline_at_ms=BROKER_MS - 1)])
    assert log.wait(3)[2] == 3


def test_upkeep_is_called_now_and_then_and_may_fail(
    log: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kmq_spark.tracker.ticker.LONGEST_WAIT_S", 0.1)
    calls: list[float] = []

    def upkeep() -> None:
        calls.append(time.monotonic())
        raise KafkaClientError("cannot commit")

    ticker = log.make()
    ticker.periodic_work = upkeep
    with caplog.at_level(logging.WARNING):
        ticker.start()
        until = time.monotonic() + COMES_S
        while len(calls) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert all(later - earlier > 0.08 for earlier, later in pairwise(calls))
    assert len(calls) >= 3
    assert "periodic work for orders.markers failed: cannot commit" in caplog.text
    assert ticker.is_alive()


def test_exception_that_ends_the_thread_is_kept(
    log: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator looks there: a thread that ended writes no TICK."""
    monkeypatch.setattr("kmq_spark.tracker.ticker.LONGEST_WAIT_S", 0.05)
    broken = ZeroDivisionError("upkeep is broken")

    def upkeep() -> None:
        raise broken

    ticker = log.make()
    ticker.periodic_work = upkeep
    ticker.start()
    ticker.join(5)
    assert not ticker.is_alive()
    assert ticker.failure is broken
    assert "the ticker of orders.markers failed" in caplog.text


def test_partition_that_wants_a_tick_and_gets_none_is_late(log: Log) -> None:
    ticker = log.start()
    assert ticker.late_s() == 0
    away = log.make(address="127.0.0.1:1", **{"delivery.timeout.ms": 200})
    away.start()
    first_s = wait_late(away)
    assert wait_late(away, first_s) > first_s


def wait_late(ticker: Ticker, above_s: float = 0.0) -> float:
    """Return how late a TICK is, once it is later than that."""
    until = time.monotonic() + COMES_S
    while ticker.late_s() <= above_s and time.monotonic() < until:
        time.sleep(0.01)
    return ticker.late_s()


def test_broker_that_is_away_costs_one_line_and_stops_nothing(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    ticker = log.make(address="127.0.0.1:1", **{"delivery.timeout.ms": 200})
    with caplog.at_level(logging.WARNING):
        ticker.start()
        with pytest.raises(KafkaClientError, match=r"cannot write TICKs to orders.markers within 2 s"):
            ticker.wait_first_ticks(2.0)  # the client looks for what has timed out once a second
    lines = [record.getMessage() for record in caplog.records if record.name == "kmq_spark.tracker.ticker"]
    assert len(lines) == 1
    assert lines[0].startswith("cannot write TICKs to orders.markers: ")
    ticker.stop()
    assert not ticker.is_alive()
