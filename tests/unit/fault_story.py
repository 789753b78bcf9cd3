"""A right story of a queue for the checker's tests, and what it may be made to tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faults.checker import check
from faults.conservation import Told
from faults.leases import Session, covered
from faults.topics import Dump, Record
from faults.waits import Bounds
from kmq_spark.core.fold import PartitionState, Rules, fold
from kmq_spark.core.markers import MarkerType, MessageId, Outcome
from kmq_spark.testing import end, log, start, tick
from kmq_spark.wire.headers import DELIVERY_COUNT, DLQ_MESSAGE, ORIGIN, PREVIOUS, SILENT_COUNT

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.checker import Verdict
    from kmq_spark.core.events import LoggedMarker
    from kmq_spark.core.state import Status

OLD, NEW = Session("old", {0: 0}), Session("new", {0: 100})
REDELIVERED, DEAD_LETTERED = Outcome.REDELIVERED, Outcome.DEAD_LETTERED


def first_copy(offset: int) -> Record:
    """Return a message as its producer sent it."""
    return Record(MessageId(0, offset), 500, b"key", f"id-{offset}|body".encode(), (("trace", b"t"),))


def next_copy(
    offset: int, previous: int, count: int, at_ms: int, *, origin: int | None = None, silent: int | None = None
) -> Record:
    """Return a message as the tracker sends it, or a dead letter; all its deliveries ended without a word."""
    source = first_copy(previous if origin is None else origin)
    ours: dict[str, object] = {
        DELIVERY_COUNT: count,
        PREVIOUS: f"0:{previous}",
        ORIGIN: f"0:{previous if origin is None else origin}",
    }
    ours[SILENT_COUNT] = count if silent is None else silent
    headers = (*source.headers, *((name, str(value).encode()) for name, value in ours.items()))
    return Record(MessageId(0, offset), at_ms, source.key, source.value, headers)


def handled(offset: int, name: str = "") -> dict[str, Any]:
    """Return what a consumer writes down when its handler has returned."""
    return {"event": "handled", "id": name or f"id-{offset}", "copy": [0, offset]}


class Story:
    """
    A queue whose every promise was kept.

    Message 0 is acked. Message 1 expires, and its copy 10 is acked. Message 2 is rejected. Message 3 uses up its two
    deliveries. Each test breaks one thing.
    """

    def __init__(self) -> None:
        """Write the story."""
        self.markers: list[LoggedMarker] = log(
            start(0, 1_000, count=4),  # 0: due at 6_000
            end(0, 2_000),
            end(2, 2_100, outcome=Outcome.REJECTED),
            tick(2_500),  # 3: the rejection is due
            end(2, 2_600, outcome=DEAD_LETTERED, reason="bad"),
            tick(6_100),  # 5: messages 1 and 3 are due
            end(1, 6_200, outcome=REDELIVERED),
            end(3, 6_200, outcome=REDELIVERED),
            start(10, 6_500, delivery_count=2, count=2),  # 8: due at 11_500
            end(10, 7_000),
            tick(11_600),  # 10: copy 11 is due, for the last time
            end(11, 11_700, outcome=DEAD_LETTERED, reason="delivery limit reached: 2 of 2"),
        )
        self.messages = [first_copy(offset) for offset in range(4)]
        self.messages += [next_copy(10, 1, 1, 6_200), next_copy(11, 3, 1, 6_200)]
        self.dead_letters = [next_copy(0, 2, 1, 2_600), next_copy(1, 11, 2, 11_700, origin=3)]
        self.events: list[dict[str, Any]] = [
            {"event": event, "id": f"id-{offset}"} for offset in range(4) for event in ("send", "sent", "delivered")
        ]
        self.events += [handled(0), handled(10, "id-1")]
        self.sessions = [OLD]
        self.bounds = Bounds()
        self._next_offset = 0
        self.removed: set[MessageId] = set()
        self.tracker_tells: Callable[[Status], Status] = lambda status: status

    def append(self, *markers: LoggedMarker, is_handled: bool = True) -> None:
        """Go on with the log; what is acked has been handled."""
        first = max(self._next_offset, self.markers[-1].marker_offset + 1)
        self.markers += log(*markers, first=first)
        for marker in (logged.marker for logged in markers if is_handled):
            if marker is not None and marker.type is MarkerType.END and marker.outcome is Outcome.ACKED:
                self.events += [handled(message_id.message_offset) for message_id in covered(marker)]

    def commit(self) -> None:
        """End a transaction: its commit takes an offset."""
        self._next_offset = self.markers[-1].marker_offset + 2

    def verdict(self) -> Verdict:
        """Check it."""
        dump = Dump({0: self.markers}, self.messages, self.dead_letters, removed=self.removed)
        status = fold(PartitionState.empty(), self.markers, Rules(max_deliveries=2)).status
        told = {0: Told(0, self.tracker_tells(status))}
        return check(dump, self.events, self.sessions, max_deliveries=2, told=told, bounds=self.bounds)


def defer(story: Story, *, decided_ms: int = 20_001, count: int = 0, silent: int = 0) -> None:
    """Message 4 is put off until 20_000, and comes then."""
    story.messages += [first_copy(4), next_copy(12, 4, count, 20_100, silent=silent)]
    story.events.append({"event": "send", "id": "id-4"})
    story.append(start(4, 12_000, lease_ms=0, never_handed_out=True, due_at_ms=20_000), tick(decided_ms))
    story.append(end(4, 20_100, outcome=REDELIVERED), start(12, 20_200, delivery_count=count + 1), end(12, 20_300))


def write_gone_for_what_is_there(story: Story, offset: int = 1) -> None:
    """I5: the dead letter says that retention removed the payload, and the record is in the topic."""
    story.markers[6] = end(offset, 6_200, outcome=DEAD_LETTERED, reason="payload gone", marker_offset=6)
    story.messages = [record for record in story.messages if record.place.message_offset != 10]
    gone = next_copy(2, offset, 1, 6_200)
    story.dead_letters.append(gone._replace(value=None, headers=(*gone.headers, (DLQ_MESSAGE, b"payload gone"))))
