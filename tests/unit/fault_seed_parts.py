"""What the seeds of violations are made of: steps that several of them take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from faults.allowances import Process, Run
from kmq_spark.core.markers import Outcome
from kmq_spark.testing import end, start, tick
from tests.unit.fault_story import (
    ACTOR,
    DEAD_LETTERED,
    REDELIVERED,
    Story,
    copy_of,
    event,
    letter_of,
)

if TYPE_CHECKING:
    from faults.topics import Record
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status


HOUR_MS = 3_600_000
LIMIT_REACHED = "delivery limit reached: 2 of 2"
TTL_WAS_OVER = "expired: ttl of 3000 ms was over"


def counted(status: Status, **more: int) -> dict[str, int]:
    """Return the counters of a status, some of them changed."""
    return {name: count + more.get(name, 0) for name, count in status.counters.items()}


def redeliver(
    story: Story,
    offset: int,
    to: int,
    at_ms: int,
    *before: LoggedMarker,
    count: int = 1,
    is_silent: bool = True,
    error: str = "",
) -> Record:
    """Let the tracker redeliver a message; its copy is started and acked."""
    story.append(*before, end(offset, at_ms, outcome=REDELIVERED))
    copy = copy_of(story.message(offset), to, at_ms, count, is_silent=is_silent, error=error)
    story.messages.append(copy)
    story.append(start(to, at_ms + 100, delivery_count=count + 1), end(to, at_ms + 200))
    return copy


def bury(  # noqa: PLR0917  # as a sentence
    story: Story, offset: int, to: int, at_ms: int, count: int, reason: str, *before: LoggedMarker
) -> None:
    """Let the tracker dead-letter a message."""
    story.append(*before, end(offset, at_ms, outcome=DEAD_LETTERED, reason=reason))
    story.dead_letters.append(letter_of(story.message(offset), to, at_ms, count, reason))


def defer(
    story: Story, *, decided_ms: int = 20_001, count: int = 0, is_silent: bool = False, delay_ms: int = 8_200
) -> None:
    """Message 4 is put off until 20_000, and comes then."""
    story.add(4, 11_800, (("kmq-delay-ms", b"%d" % delay_ms),))
    story.append(start(4, 12_000, lease_ms=0, never_handed_out=True, due_at_ms=20_000))
    redeliver(story, 4, 12, 20_100, tick(decided_ms), count=count, is_silent=is_silent)


def keep_what_expires(story: Story) -> None:
    """Let the queue's rules turn expired messages into dead letters."""
    story.rules = story.rules._replace(dead_letters_expired=True)
    story.tracker_rules = replace(story.tracker_rules, dead_letters_expired=True)


def expire_in_a_lease(story: Story) -> None:
    """Message 4 has a TTL of 3 s, its lease runs out at 19_000, and its queue keeps what expires."""
    keep_what_expires(story)
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_000), tick(19_100))


def expire_at_its_start(story: Story) -> None:
    """A consumer ends message 4, whose TTL is over, and the TICK at 15_000 decides it; its queue keeps what expires."""
    keep_what_expires(story)
    story.add(4, 11_800, (("kmq-ttl-ms", b"3000"),))
    story.append(start(4, 14_800), is_handled=False)
    story.append(end(4, 14_900, outcome=Outcome.EXPIRED, reason="expired"), tick(15_000))


def fetch_again(story: Story, offset: int = 0, at_ms: int = 40_000, *, ends: bool = True, by: int = 77) -> None:
    """Let a consumer start a message again, and acknowledge it."""
    first = len(story.markers)
    story.append(start(offset, at_ms, delivery_count=1 + (offset == 11)), is_handled=False)
    if ends:
        story.append(end(offset, at_ms + 100), is_handled=False)
    for at in range(first, len(story.markers)):
        story.resign(at, f"kmq-consumer-host-{by}-abcd")
    kinds = ("delivered", "handled") if ends else ("delivered",)
    name = story.message(offset).id
    actor = ACTOR if by == 77 else f"other-{by}"
    story.events += [event(kind, at_ms + 50, offset, name, actor=actor) for kind in kinds]


def kill_the_worker(story: Story, at_ms: int) -> None:
    """Let the consumer of the story end by `kill -9`."""
    killed = Process("WorkerChild", "worker", 137, is_ended_by_us=True, ended_at_ms=at_ms)
    story.run = Run([killed, Process("TrackerChild", "tracker-1", 0)], 1)
    story.events = [each for each in story.events if each["event"] != "ended"]
