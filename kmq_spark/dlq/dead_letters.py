"""
Look at the dead letters of a queue, send them back, end them.

Rule 1: a dead-letter topic is a log of work like any other: what is done with is told by ENDs in the redrive topic, and
a letter without one is open.
Rule 2: what is meant is said: ids, a filter, or all of them; there is no default that touches everything.
Rule 3: nothing is removed before its END is committed.

Source: SQS StartMessageMoveTask; RabbitMQ's shovel; Kafka's share groups (KIP-932) have no redrive.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.dlq.filter import DeadLetterFilter, filter_of, parse_id
from kmq_spark.dlq.log import DeadLetterLog
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, client_error, make_client
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT_MS, QueueLayout, check_queue, ensure_redrive_topic, partition_count
from kmq_spark.wire.dead_letter import DeadLetter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kmq_spark.core.closed import ClosedRanges

    Where = DeadLetterFilter | Mapping[str, object]

__all__ = ["DeadLetter", "DeadLetterFilter", "RedriveSummary", "list_dead_letters", "purge", "redrive"]

MAX_IDS = 100_000
"""Ids in one call: more are a filter."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where to, and how long."""

    bootstrap_servers: str
    timeout_ms: int
    extra: Mapping[str, str] | None

    def layout(self, queue: str) -> QueueLayout:
        return check_queue(
            queue, bootstrap_servers=self.bootstrap_servers, timeout_ms=self.timeout_ms, extra=self.extra
        )

    def admin(self) -> AdminClient:
        return make_client(AdminClient, admin_config(self.bootstrap_servers, extra=self.extra))

    def log(self, layout: QueueLayout) -> DeadLetterLog:
        return DeadLetterLog(
            layout, bootstrap_servers=self.bootstrap_servers, timeout_ms=self.timeout_ms, extra=self.extra
        )


@dataclass(frozen=True, slots=True)
class _Selection:
    """What a caller means, checked."""

    ids: tuple[tuple[int, int], ...]
    where: DeadLetterFilter
    limit: int | None

    def letters(self, log: DeadLetterLog, closed: ClosedRanges, summary: RedriveSummary) -> Iterator[DeadLetter]:
        """Yield the open letters that are meant."""
        if not self.ids:
            for letter in log.letters(log.bounds(closed)):
                if not closed.is_closed(letter.partition, letter.offset) and self.where.matches(letter):
                    yield letter
            return
        log.bounds(closed)  # for its check
        for name, found in log.by_ids(self.ids):
            if closed.is_closed(*parse_id(name)):
                summary.done_before += 1
            elif found is None:
                summary.missing.append(name)
            else:
                yield found


def list_dead_letters(
    queue: str,
    *,
    bootstrap_servers: str,
    where: Where | None = None,
    ids: Sequence[str] = (),
    limit: int | None = None,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    extra: Mapping[str, str] | None = None,
) -> Iterator[DeadLetter]:
    """
    Read the dead letters that are neither redriven nor purged.

    Args:
        queue: Name of the queue, or `queue@group`.
        bootstrap_servers: Comma-separated `host:port`.
        where: Which ones; a `DeadLetterFilter`, or its parts by name.
        ids: Only these, `partition:offset`; ids that are not there are passed over.
        limit: Most letters to give, at least 1.
        timeout_ms: How long the broker may take to answer.
        extra: librdkafka settings.

    Yields:
        A partition after the other, oldest first.

    Raises:
        ConfigError: A value is not allowed.
        TopicError: The queue does not exist or does not fit.
        KafkaClientError: The broker cannot be reached.
    """
    selection = _selection(ids, where, limit, everything=where is None and not ids)
    place = _Place(bootstrap_servers, timeout_ms, extra)
    layout = place.layout(queue)
    log = place.log(layout)
    closed = log.closed(layout.redrive_partition_count)
    return _first(selection.letters(log, closed, RedriveSummary()), selection.limit)


def redrive(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: Where | None = None,
    everything: bool = False,
    to: str | None = None,
    limit: int | None = None,
    dry_run: bool = False,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    Send dead letters back to their queue, each exactly once.

    A call that was cut short, by whatever, is simply made again: what it had committed is done, the rest is not.

    Args:
        queue: Name of the queue, or `queue@group`: that group's dead letters, and to it alone they go back.
        bootstrap_servers: Comma-separated `host:port`.
        ids: These, `partition:offset`.
        where: Those that a filter lets through: a `DeadLetterFilter`, or its parts by name.
        everything: All of them.
        to: Another queue or `queue@group` to send them to.
        limit: Most letters to redrive, at least 1.
        dry_run: Only count; nothing is written.
        timeout_ms: How long the broker may take to answer.
        extra: librdkafka settings.

    Returns:
        What was done. Records that are no messages, or whose payload is gone, are left and told.

    Raises:
        ConfigError: A value is not allowed, or not exactly one of *ids*, *where* and *everything* is given.
        TopicError: A topic is missing or does not fit.
        FencedError: Another redrive or purge of the queue began meanwhile; what is committed stands.
        KafkaClientError: The broker cannot be reached; run it again.
    """
    selection = _selection(ids, where, limit, everything=everything)
    target = QueueTopics.parse(queue if to is None else to)
    place = _Place(bootstrap_servers, timeout_ms, extra)
    layout = place.layout(queue)
    partitions = partition_count(place.admin(), target.queue_topic, bootstrap_servers, timeout_ms)
    if not partitions:
        message = f"there is no topic {target.queue_topic!r} to redrive to; run `kmq queue create {target.queue_topic}`"
        raise TopicError(message)
    return _end_letters(place, layout, selection, target, partitions, dry_run=dry_run)


def purge(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: Where | None = None,
    everything: bool = False,
    limit: int | None = None,
    dry_run: bool = False,
    timeout_ms: int = DEFAULT_TIMEOUT_MS,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    End dead letters for good, and let the broker remove what lies below the lowest that is still open.

    Args:
        queue: As for `redrive`.
        bootstrap_servers: As for `redrive`.
        ids: As for `redrive`.
        where: As for `redrive`.
        everything: As for `redrive`.
        limit: As for `redrive`.
        dry_run: As for `redrive`.
        timeout_ms: As for `redrive`.
        extra: As for `redrive`.

    Returns:
        What was done.

    Raises:
        KmqError: As `redrive`.
    """
    selection = _selection(ids, where, limit, everything=everything)
    place = _Place(bootstrap_servers, timeout_ms, extra)
    layout = place.layout(queue)
    summary = _end_letters(place, layout, selection, None, 0, dry_run=dry_run)
    if not dry_run:
        _remove_done(place, place.layout(queue))
    return summary


def _end_letters(
    place: _Place,
    layout: QueueLayout,
    selection: _Selection,
    to: QueueTopics | None,
    to_partition_count: int,
    *,
    dry_run: bool,
) -> RedriveSummary:
    summary = RedriveSummary(is_dry_run=dry_run)
    log = place.log(layout)
    if dry_run:
        closed = log.closed(layout.redrive_partition_count)
        summary.count(_meant(selection, log, closed, summary, is_purge=to is None))
        return summary
    redrive_partition_count = ensure_redrive_topic(
        layout, admin=place.admin(), bootstrap_servers=place.bootstrap_servers, timeout_ms=place.timeout_ms
    )
    redriver = Redriver(
        layout,
        redrive_partition_count,
        to=to,
        to_partition_count=to_partition_count,
        bootstrap_servers=place.bootstrap_servers,
        timeout_ms=place.timeout_ms,
        extra=place.extra,
    )
    with closing(redriver):
        # Older redrives are fenced by now: what is not told as done here is not done by them either.
        closed = log.closed(redrive_partition_count)
        redriver.end(_meant(selection, log, closed, summary, is_purge=to is None), summary)
    return summary


def _meant(
    selection: _Selection, log: DeadLetterLog, closed: ClosedRanges, summary: RedriveSummary, *, is_purge: bool
) -> Iterator[DeadLetter]:
    """Yield what is to be done, count what cannot be."""

    def possible() -> Iterator[DeadLetter]:
        for letter in selection.letters(log, closed, summary):
            if letter.problem and not is_purge:
                summary.leave(letter, letter.problem)
            else:
                yield letter

    return _first(possible(), selection.limit)


def _first(letters: Iterator[DeadLetter], limit: int | None) -> Iterator[DeadLetter]:
    """Yield the first ones, and ask for none beyond them."""
    for given, letter in enumerate(letters, 1):
        yield letter
        if given == limit:
            return


def _remove_done(place: _Place, layout: QueueLayout) -> None:
    """Let the broker remove what lies below the lowest open letter of each partition."""
    log = place.log(layout)
    closed = log.closed(layout.redrive_partition_count)
    bounds = log.bounds(closed)
    topic, wanted = layout.topics.dead_letter_topic, []
    for partition, (first, end) in bounds.items():
        lowest = first
        with closing(log.letters({partition: (first, end)})) as letters:
            for letter in letters:
                if not closed.is_closed(letter.partition, letter.offset):
                    break
                lowest = letter.offset + 1
        if lowest > first:
            wanted.append(TopicPartition(topic, partition, lowest))
    if not wanted:
        return
    admin = place.admin()  # kept: a client that is collected never answers
    futures = admin.delete_records(wanted, request_timeout=place.timeout_ms / 1000)
    for future in futures.values():
        try:
            future.result()
        except KafkaException as error:
            raise client_error(error, f"dead letters are purged, but cannot remove records of {topic}") from error


def _selection(ids: Sequence[str], where: Where | None, limit: int | None, *, everything: bool) -> _Selection:
    """Check what a caller means."""
    given = [
        name
        for name, is_given in (("ids", bool(ids)), ("where", where is not None), ("everything", everything))
        if is_given
    ]
    if isinstance(ids, str):
        message = f"ids are not allowed: got the text {ids!r}, a list of partition:offset; put it into a list"
        raise ConfigError(message)
    if len(given) != 1:
        got = " and ".join(given) or "nothing"
        message = f"choose dead letters: got {got}, one of ids, a filter or all; give --id, a filter, or --all"
        raise ConfigError(message)
    if len(ids) > MAX_IDS:
        message = f"too many ids: got {len(ids)}, at most {MAX_IDS}; use a filter"
        raise ConfigError(message)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        message = f"limit is not allowed: got {limit!r}, at least 1; leave it out for no limit"
        raise ConfigError(message)
    chosen = filter_of(where)
    if where is not None and chosen.is_empty:
        message = "the filter is empty: got none of its parts, at least one; say that all are meant"
        raise ConfigError(message)
    return _Selection(tuple(parse_id(text) for text in ids), chosen, limit)
