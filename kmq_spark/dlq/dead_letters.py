"""
List, redrive and purge the dead letters of a queue.

Rule 1: an END in the redrive topic closes a dead letter (redriven or purged). A dead letter without an END is open.
Rule 2: a record is deleted only after its END is committed.

Source: SQS StartMessageMoveTask; RabbitMQ's shovel. Kafka's share groups (KIP-932) have no redrive.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.core.durations import seconds
from kmq_spark.dlq.filter import DeadLetterFilter, parse_id
from kmq_spark.dlq.log import DeadLetterLog, LetterState
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.errors import ConfigError, TopicError
from kmq_spark.kafka.client_errors import answer_of, client_error
from kmq_spark.kafka.queue_topics import QueueTopics
from kmq_spark.kafka.settings import admin_config, make_client
from kmq_spark.kafka.topics import DEFAULT_TIMEOUT, QueueLayout, check_queue, partition_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from kmq_spark.wire.dead_letter import DeadLetter

MAX_IDS = 100_000
"""Most ids in one call; use a filter to select more."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The dead letters that the caller selected, validated."""

    ids: tuple[tuple[int, int], ...]
    where: DeadLetterFilter | None
    limit: int | None

    def letters(self, log: DeadLetterLog, state: LetterState, summary: RedriveSummary) -> Iterator[DeadLetter]:
        """Yield the selected letters that are open. Count selected ids that are closed or missing in *summary*."""
        if not self.ids:
            for letter in log.letters(state.bounds):
                is_closed = state.closed.is_closed(letter.partition, letter.offset)
                if not is_closed and (self.where is None or self.where.matches(letter)):
                    yield letter
            return
        for place, found in log.by_ids(self.ids):
            if state.closed.is_closed(*place):
                summary.done_before += 1
            elif found is None:
                summary.missing.append(f"{place[0]}:{place[1]}")
            else:
                yield found


def list_dead_letters(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: DeadLetterFilter | None = None,
    limit: int | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> Iterator[DeadLetter]:
    """
    Read the open dead letters: those that are neither redriven nor purged.

    Args:
        queue: Name of the queue, or `queue@subscription`.
        bootstrap_servers: Comma-separated `host:port`.
        ids: Only these dead letters, as `partition:offset`. Ids that are closed or not in the topic are skipped.
        where: Only dead letters that match this filter.
        limit: Most letters to yield, at least 1. None: no limit.
        timeout: Timeout of each request to the broker, seconds or a timedelta.
        extra: librdkafka settings.

    Yields:
        The dead letters, partition by partition, oldest first in each.

    Raises:
        ConfigError: A value is not allowed.
        TopicError: The queue does not exist, or its topics have wrong settings.
        KafkaClientError: The broker cannot be reached.
    """
    selection = select(ids, where, limit, is_all=where is None and not ids)
    reach = _reach(bootstrap_servers, timeout, extra)
    log = DeadLetterLog(check_queue(queue, **reach), **reach)
    return islice(selection.letters(log, log.state(), RedriveSummary()), limit)


def redrive(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: DeadLetterFilter | None = None,
    all: bool = False,  # noqa: A002  # the word for all of them, as on the command line
    to: str | None = None,
    limit: int | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    Send dead letters back to their queue, each exactly once.

    After an interrupted call, call again: letters that the first call committed are closed and are not sent again. To
    see what would be sent, use `list_dead_letters`.

    Args:
        queue: Name of the queue, or `queue@subscription`. The dead letters of a subscription are sent to it alone.
        bootstrap_servers: Comma-separated `host:port`.
        ids: The dead letters to redrive, as `partition:offset`.
        where: The dead letters that match this filter.
        all: Whether to redrive all open dead letters.
        to: Another queue or `queue@subscription` to send them to. None: *queue*.
        limit: Most letters to redrive, at least 1. None: no limit.
        timeout: Timeout of each request to the broker, seconds or a timedelta.
        extra: librdkafka settings.

    Returns:
        What was done. Dead letters that are not messages, or have no payload, are not redriven; the summary names
        them.

    Raises:
        ConfigError: A value is not allowed, or not exactly one of *ids*, *where* and *all* is given.
        TopicError: A topic is missing or has wrong settings.
        FencedError: Another redrive or purge of the queue has started. Committed letters stay redriven.
        KafkaClientError: The broker cannot be reached; call again.
    """
    selection = select(ids, where, limit, is_all=all)
    target = QueueTopics.parse(queue if to is None else to)
    reach = _reach(bootstrap_servers, timeout, extra)
    layout = check_queue(queue, **reach)
    partitions = partition_count(_admin(reach), target.queue_topic, bootstrap_servers, reach["timeout"])
    if not partitions:
        message = f"there is no topic {target.queue_topic!r} to redrive to; run `kmq queue create {target.queue_topic}`"
        raise TopicError(message)
    return _close_letters(reach, layout, selection, target, partitions)


def purge(
    queue: str,
    *,
    bootstrap_servers: str,
    ids: Sequence[str] = (),
    where: DeadLetterFilter | None = None,
    all: bool = False,  # noqa: A002  # as above
    limit: int | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    extra: Mapping[str, str] | None = None,
) -> RedriveSummary:
    """
    Close dead letters without redriving them, then delete records from the dead-letter topic.

    In each partition the broker deletes the records below the lowest open dead letter. Arguments and errors are those
    of `redrive`.

    Returns:
        What was done.
    """
    selection = select(ids, where, limit, is_all=all)
    reach = _reach(bootstrap_servers, timeout, extra)
    layout = check_queue(queue, **reach)
    summary = _close_letters(reach, layout, selection, None, 0)
    _delete_closed(reach, layout)
    return summary


def _close_letters(
    reach: dict[str, Any], layout: QueueLayout, selection: Selection, to: QueueTopics | None, to_partition_count: int
) -> RedriveSummary:
    summary = RedriveSummary()
    log = DeadLetterLog(layout, **reach)
    redriver = Redriver(layout, to=to, to_partition_count=to_partition_count, topic_id=log.topic_id(), **reach)
    with closing(redriver):
        state = log.state(redriver.ends)

        def closable() -> Iterator[DeadLetter]:
            for letter in selection.letters(log, state, summary):
                if letter.problem and to is not None:
                    summary.leave(letter, letter.problem)
                else:
                    yield letter

        redriver.run(islice(closable(), selection.limit), summary)
    return summary


def _delete_closed(reach: dict[str, Any], layout: QueueLayout) -> None:
    """Delete the records below the lowest open letter of each partition."""
    log = DeadLetterLog(layout, **reach)
    closed, bounds = log.state()
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
    admin = _admin(reach)  # keeps a reference: the futures of a garbage-collected client never complete
    futures = admin.delete_records(wanted, request_timeout=reach["timeout"])
    for future in futures.values():
        try:
            answer_of(future, reach["timeout"])
        except KafkaException as error:
            raise client_error(error, f"purged the dead letters, but cannot delete records of {topic}") from error


def _reach(bootstrap_servers: str, timeout: float | timedelta, extra: Mapping[str, str] | None) -> dict[str, Any]:
    return {"bootstrap_servers": bootstrap_servers, "timeout": seconds("timeout", timeout), "extra": extra}


def _admin(reach: dict[str, Any]) -> AdminClient:
    return make_client(AdminClient, admin_config(reach["bootstrap_servers"], extra=reach["extra"]))


def select(ids: Sequence[str], where: DeadLetterFilter | None, limit: int | None, *, is_all: bool) -> Selection:
    """
    Check what a caller selects.

    Raises:
        ConfigError: Not exactly one selector is given, or a value is not allowed.
    """
    if isinstance(ids, str):
        message = f"ids is not allowed: got the text {ids!r}; expected a list of partition:offset; put it into a list"
        raise ConfigError(message)
    selectors = [
        name for name, is_given in (("ids", bool(ids)), ("where", where is not None), ("all", is_all)) if is_given
    ]
    if len(selectors) != 1:
        got = " and ".join(selectors) or "nothing"
        message = f"choose dead letters: got {got}; expected one of ids, where and all; give --id, a filter, or --all"
        raise ConfigError(message)
    if len(ids) > MAX_IDS:
        message = f"too many ids: got {len(ids)}; expected at most {MAX_IDS}; use a filter"
        raise ConfigError(message)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        message = f"limit is not allowed: got {limit!r}; expected at least 1; leave it out for no limit"
        raise ConfigError(message)
    return Selection(tuple(parse_id(text) for text in ids), where, limit)
