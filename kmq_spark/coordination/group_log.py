"""
Read a group's partition to its end, so that a new member knows the group's world before it writes.

Rule 1: begin near the end of the partition; where no snapshot is found there, begin at its first record.
Rule 2: a world that is not complete is accepted only where no live member knows more of the group.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kmq_spark.core.coordination.records import MAX_HEARTBEAT_MS
from kmq_spark.errors import KafkaClientError
from kmq_spark.wire.coordination_log import GroupLog

if TYPE_CHECKING:
    from kmq_spark.coordination.channel import Channel

READ_BACK = 30_000
"""Records that a new member reads from the end: a leader writes a snapshot more often."""

LONGEST_SILENCE_S = MAX_HEARTBEAT_MS // 1000 + 5
"""A live member writes several heartbeats within this time, whatever its T."""

_POLL_S = 0.1


def read_group_log(channel: Channel, group: str, until_s: float) -> GroupLog:
    """
    Read the group's partition to its end: from a snapshot near the end, or from the beginning.

    Args:
        channel: To the partition; afterwards it continues at the end of what was read.
        group: Name of the group.
        until_s: When to give up, seconds of `time.monotonic`.

    Returns:
        The log, complete.

    Raises:
        TopicError: The topic does not exist, or does not fit.
        KafkaClientError: The broker cannot be reached, or the group's world cannot be known by *until_s*.
    """
    first, end = channel.open(max(0.1, until_s - time.monotonic()))
    start = max(first, end - READ_BACK)
    log = _read_from(channel, group, start, end, until_s)
    if not log.is_complete and start > first:
        log = _read_from(channel, group, first, end, until_s)
    if not log.is_complete and log.stranger_at_ms < 0:
        log.accept()
    stranger_at_ms, quiet_since_s = log.stranger_at_ms, time.monotonic()
    while not log.is_complete:
        # A process is, or was, a member whose JOIN was deleted. The leader's next snapshot says the rest; where no
        # member is alive, none writes a heartbeat within the longest T.
        _read_once(channel, log)
        if log.stranger_at_ms != stranger_at_ms:
            stranger_at_ms, quiet_since_s = log.stranger_at_ms, time.monotonic()
        elif time.monotonic() - quiet_since_s > LONGEST_SILENCE_S:
            log.accept()
        advice = (
            f"check that its leader runs; where all members are dead, join with timeout_s above {LONGEST_SILENCE_S}"
        )
        _check_time(until_s, channel, f"no snapshot of group {group!r} was found", advice)
    return log


def _read_from(channel: Channel, group: str, start: int, end: int, until_s: float) -> GroupLog:
    log = GroupLog(group, topic=channel.topic, partition=channel.partition, first_offset=start)
    channel.seek(start)
    while log.world.next_offset < end:
        _read_once(channel, log)
        place = f"offset {log.world.next_offset} of {end}"
        _check_time(until_s, channel, f"cannot read {channel.topic} to its end: got to {place}", "check the broker")
    return log


def _read_once(channel: Channel, log: GroupLog) -> None:
    for one in channel.read(_POLL_S):
        log.read(one.offset, one.append_time_ms, one.key, one.value)


def _check_time(until_s: float, channel: Channel, what: str, advice: str) -> None:
    if channel.failure is not None:
        raise channel.failure
    if time.monotonic() > until_s:
        trouble = f" ({channel.trouble})" if channel.trouble else ""
        raise KafkaClientError(f"{what}{trouble}; {advice}", code="_TIMED_OUT", retriable=True)
