"""
List, redrive and purge the dead letters of a queue.

Rule 1: An END in the redrive topic closes a dead letter (redriven or purged). A dead letter without an END is open.
Rule 2: The caller selects dead letters explicitly: by ids, by a filter, or all of them. No default selects all.
Rule 3: A record is deleted only after its END is committed.

Source: SQS StartMessageMoveTask; RabbitMQ's shovel. Kafka's share groups (KIP-932) have no redrive.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.config import Reach
from kmq_spark.dlq.filter import DeadLetterFilter, filter_of, parse_id
from kmq_spark.dlq.log import DeadLetterLog
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.client_errors import answer_of, client_error
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT, QueueLayout, check_queue, partition_count
from kmq_spark.wire.dead_letter import DeadLetter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kmq_spark.core.closed import ClosedRanges

    Where = DeadLetterFilter | Mapping[str, object]

__all__ = ["DeadLetter", "DeadLetterFilter", "RedriveSummary", "list_dead_letters", "purge", "redrive"]

MAX_IDS = 100_000
"""Most ids in one call; use a filter to select more."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """The dead letters that the caller selected, validated."""

    ids: tuple[tuple[int, int], ...]
    where: DeadLetterFilter
    limit: int | None

    def letters(self, log: DeadLetterLog, closed: ClosedRanges, summary: RedriveSummary) -> Iterator[DeadLetter]:
        """Yield the selected letters that are open. Count selected ids that are closed or missing in *summary*."""
        if not self.ids:
            for letter in log.letters(log.bounds(closed)):
                if not closed.is_closed(letter.partition, letter.offset) and self.where.matches(letter):
                    yield letter
            return
        log.bounds(closed)  # raises TopicError where the dead-letter topic was created again
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
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> Iterator[DeadLetter]:
    """
    Read the open dead letters: those that are neither redriven nor purged.

    Args:
        queue: Name of the queue, or `queue@subscription`.
        bootstrap_servers: Comma-separated `host:port`.
        where: A `DeadLetterFilter`, or its fields by name. None, without *ids*: all.
        ids: Only these dead letters, as `partition:offset`. Ids that are closed or not in the topic are skipped.
        limit: Most letters to yield, at least 1. None: no limit.
        timeout: Bound on each call to the broker, seconds.
        extra: librdkafka settings.

    Yields:
        The dead letters, partition by partition, oldest first in each.

    Raises:
        ConfigError: A value is not allowed.
        TopicError: The queue does not exist, or its topics have wrong settings.
        KafkaClientError: The broker cannot be reached.
    """
    selection = _selection(ids, where, limit, everything=where is None and not ids)
    reach = Reach(bootstrap_servers=bootstrap_servers, timeout=timeout, extra=dict(extra or {}))
    layout = check_queue(queue, **reach)
    log = DeadLetterLog(layout, **reach)
    closed = log.closed(layout.redrive_partition_count)
    return _limited(selection.letters(log, closed, RedriveSummary()), selection.limit)


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
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    Send dead letters back to their queue, each exactly once.

    After an interrupted call, call again: letters that the first call committed are closed and are not sent again.

    Args:
        queue: Name of the queue, or `queue@subscription`. The dead letters of a group are sent to that group alone.
        bootstrap_servers: Comma-separated `host:port`.
        ids: The dead letters to redrive, as `partition:offset`.
        where: The dead letters that match this filter: a `DeadLetterFilter`, or its fields by name.
        everything: Whether to redrive all open dead letters.
        to: Another queue or `queue@subscription` to send them to. None: *queue*.
        limit: Most letters to redrive, at least 1. None: no limit.
        dry_run: Count only; write nothing.
        timeout: Bound on each call to the broker, seconds.
        extra: librdkafka settings.

    Returns:
        What was done. Dead letters that are not messages, or have no payload, are not redriven; the summary names
        them.

    Raises:
        ConfigError: A value is not allowed, or not exactly one of *ids*, *where* and *everything* is given.
        TopicError: A topic is missing or has wrong settings.
        FencedError: Another redrive or purge of the queue has started. Committed letters stay redriven.
        KafkaClientError: The broker cannot be reached; call again.
    """
    selection = _selection(ids, where, limit, everything=everything)
    target = QueueTopics.parse(queue if to is None else to)
    reach = Reach(bootstrap_servers=bootstrap_servers, timeout=timeout, extra=dict(extra or {}))
    layout = check_queue(queue, **reach)
    partitions = partition_count(_admin(reach), target.queue_topic, bootstrap_servers, timeout)
    if not partitions:
        message = f"there is no topic {target.queue_topic!r} to redrive to; run `kmq queue create {target.queue_topic}`"
        raise TopicError(message)
    return _close_letters(reach, layout, selection, target, partitions, dry_run=dry_run)


def purge(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: Where | None = None,
    everything: bool = False,
    limit: int | None = None,
    dry_run: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    Close dead letters without redriving them, then delete records from the dead-letter topic.

    In each partition the broker deletes the records below the lowest open dead letter.

    The arguments and errors are those of `redrive`.

    Returns:
        What was done.
    """
    selection = _selection(ids, where, limit, everything=everything)
    reach = Reach(bootstrap_servers=bootstrap_servers, timeout=timeout, extra=dict(extra or {}))
    layout = check_queue(queue, **reach)
    summary = _close_letters(reach, layout, selection, None, 0, dry_run=dry_run)
    if not dry_run:
        _delete_closed(reach, check_queue(queue, **reach))
    return summary


def _admin(reach: Reach) -> AdminClient:
    return make_client(AdminClient, admin_config(reach["bootstrap_servers"], extra=reach["extra"]))


def _close_letters(
    reach: Reach,
    layout: QueueLayout,
    selection: _Selection,
    to: QueueTopics | None,
    to_partition_count: int,
    *,
    dry_run: bool,
) -> RedriveSummary:
    summary = RedriveSummary(is_dry_run=dry_run)
    log = DeadLetterLog(layout, **reach)
    if dry_run:
        closed = log.closed(layout.redrive_partition_count)
        summary.count(_letters_to_close(selection, log, closed, summary, is_purge=to is None))
        return summary
    redrive_partition_count = layout.redrive_partition_count
    redriver = Redriver(
        layout,
        redrive_partition_count,
        to=to,
        to_partition_count=to_partition_count,
        **reach,
    )
    with closing(redriver):
        # Older redrives are fenced by now, so none of them can close a letter after this read.
        closed = log.closed(redrive_partition_count)
        redriver.run(_letters_to_close(selection, log, closed, summary, is_purge=to is None), summary)
    return summary


def _letters_to_close(
    selection: _Selection, log: DeadLetterLog, closed: ClosedRanges, summary: RedriveSummary, *, is_purge: bool
) -> Iterator[DeadLetter]:
    """Yield the letters to close. Count those that cannot be redriven in *summary*."""

    def closable() -> Iterator[DeadLetter]:
        for letter in selection.letters(log, closed, summary):
            if letter.problem and not is_purge:
                summary.leave(letter, letter.problem)
            else:
                yield letter

    return _limited(closable(), selection.limit)


def _limited(letters: Iterator[DeadLetter], limit: int | None) -> Iterator[DeadLetter]:
    """Yield at most *limit* letters, and do not read the iterator beyond them."""
    for count, letter in enumerate(letters, 1):
        yield letter
        if count == limit:
            return


def _delete_closed(reach: Reach, layout: QueueLayout) -> None:
    """Delete the records below the lowest open letter of each partition."""
    log = DeadLetterLog(layout, **reach)
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
    timeout_s = reach["timeout"]
    admin = _admin(reach)  # keeps a reference: the futures of a garbage-collected client never complete
    futures = admin.delete_records(wanted, request_timeout=timeout_s)
    for future in futures.values():
        try:
            answer_of(future, timeout_s)
        except KafkaException as error:
            raise client_error(error, f"purged the dead letters, but cannot delete records of {topic}") from error


def _selection(ids: Sequence[str], where: Where | None, limit: int | None, *, everything: bool) -> _Selection:
    """Validate the caller's selection."""
    selectors = [
        name
        for name, is_given in (("ids", bool(ids)), ("where", where is not None), ("everything", everything))
        if is_given
    ]
    if isinstance(ids, str):
        message = f"ids is not allowed: got the text {ids!r}, allowed is a list of partition:offset; put it into a list"
        raise ConfigError(message)
    if len(selectors) != 1:
        got = " and ".join(selectors) or "nothing"
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
        message = "the filter is empty: got no field, at least one is needed; to select all letters, set everything"
        raise ConfigError(message)
    return _Selection(tuple(parse_id(text) for text in ids), chosen, limit)
