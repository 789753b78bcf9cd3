"""
Suspects of killing their consumers (I17): while a handler has one, no handler of that process has another message.

Rule 1: a suspect is a copy whose silent deliveries have reached what its consumer isolates after.
Rule 2: a message is with a handler from the event in which it was given until the one that says what became of it, and
no longer than its lease by the log: what is lost holds nothing up.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from faults.hands import process_of_actor
from faults.protocol import ORIGIN, SILENT_COUNT, MarkerType, MessageId, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from faults.hands import Hands, TrueTimes
    from faults.topics import Record

GIVEN = "delivered"
DONE = frozenset({"handled", "raised", "rejected", "released"})

LOST_MS = 1_000
"""A consumer counts a lease from before it writes the START: so much sooner it may take it for lost."""


def crowded_suspects(
    hands: Hands, events: Sequence[Mapping[str, Any]], messages: Mapping[MessageId, Record], times: TrueTimes
) -> Iterator[str]:
    """Yield suspects that were handed out while a handler of the same process had what must not be with them."""
    held: defaultdict[str, set[MessageId]] = defaultdict(set)
    for event in sorted((one for one in events if "copy" in one), key=lambda one: float(one["monotonic"])):
        copy, process = MessageId(*event["copy"]), process_of_actor(str(event["actor"]))
        limit = int(hands.began.get(process, {}).get("isolate_after") or 0)
        if event["event"] in DONE:
            held[process].discard(copy)
        if event["event"] != GIVEN or not limit:
            continue
        at_ms = times.of(event)
        for other in sorted(held[process]):
            is_held = at_ms is None or _is_leased(hands, other, process, at_ms)
            if is_held and not _may_be_together(messages.get(copy), messages.get(other), limit):
                yield f"{copy} was handed out in process {process} together with {other}, and one of them is a suspect"
        held[process].add(copy)


def _may_be_together(one: Record | None, other: Record | None, limit: int) -> bool:
    """Return whether two messages may be with handlers of one process."""
    if one is None or other is None:
        return True
    return not (is_suspect(one, limit) or is_suspect(other, limit))


def is_suspect(record: Record, limit: int) -> bool:
    """Return whether a copy is suspected by a consumer that isolates after *limit* silent deliveries."""
    return record.header(ORIGIN) is not None and (number_of(record.header(SILENT_COUNT)) or 0) >= limit


def _is_leased(hands: Hands, copy: MessageId, process: str, at_ms: int) -> bool:
    """Return whether a process holds a message by the log."""
    said = [one for one in hands.said.get((copy, process), ()) if one.at_ms <= at_ms]
    ends = [one.at_ms + one.marker.redeliver_after_ms for one in said if one.marker.type is not MarkerType.END]
    is_ended = bool(said) and said[-1].marker.type is MarkerType.END
    return bool(ends) and not is_ended and ends[-1] - LOST_MS > at_ms
