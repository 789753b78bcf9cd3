"""All partitions of a queue together, by message, and what is found wrong with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from faults.conservation import read_account
from faults.protocol import MessageId, Outcome
from faults.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from faults.leases import Justified, Leases
    from faults.topics import Dump, Record


class Violation(NamedTuple):
    """A promise that was not kept."""

    invariant: str
    what: str


@dataclass(slots=True)
class Verdict:
    """
    What the checker found.

    Attributes:
        violations: Empty when all is well.
        waits: Each redelivered message: when it was due, and when it came.
        other_waits: Each dead letter and each expired message: the same.
        counts: What was seen, and what the promise allows.
    """

    violations: list[Violation] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    other_waits: list[Wait] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def lateness_ms(self) -> list[int]:
        """Append time of each redelivered message less its deadline."""
        return [wait.came_ms - wait.due_ms for wait in self.waits]

    def add(self, invariant: str, what: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(invariant, what))


class Whole:
    """
    All partitions together, by message.

    Attributes:
        dump: The topics.
        leases: By markers partition.
        trackers: Names of those that took over.
        messages: By place.
        ends: ENDs of trackers, with their markers partitions.
        copies: Redelivered messages, by the copy that they follow.
        letters: Dead letters, by the copy that they follow.
        accounts: By markers partition.
    """

    def __init__(self, dump: Dump, leases: Mapping[int, Leases], trackers: set[str]) -> None:
        """Sort everything by message."""
        self.dump, self.leases, self.trackers = dump, leases, trackers
        self.messages = {record.place: record for record in dump.messages}
        self.queue_partitions = {place.queue_partition for place in self.messages}
        self.ends = [(partition, end) for partition, each in leases.items() for end in each.ends]
        self.copies = _by_previous(dump.messages)
        self.letters = _by_previous(dump.dead_letters)
        self.accounts = {
            partition: read_account(dump.markers[partition], leases[partition], trackers) for partition in leases
        }

    def ends_of(self, outcome: Outcome) -> dict[MessageId, list[tuple[int, Justified]]]:
        """Return the tracker's ENDs with an outcome, by message, in log order, with their markers partitions."""
        found: defaultdict[MessageId, list[tuple[int, Justified]]] = defaultdict(list)
        for partition, end in self.ends:
            if end.outcome is outcome:
                found[end.message_id].append((partition, end))
        return found

    def is_there(self, place: MessageId) -> bool:
        """Return whether the topic still holds a message."""
        return place in self.messages and place not in self.dump.removed

    def is_injected(self, partition: int, offset: int) -> bool:
        """Return whether the injector wrote a marker."""
        return (partition, offset) in self.dump.injected

    def origin(self, place: MessageId) -> MessageId:
        """Return the first copy of a message; itself where it is unknown."""
        record = self.messages.get(place)
        return place if record is None else record.origin


def _by_previous(records: Iterable[Record]) -> dict[MessageId, list[Record]]:
    found: defaultdict[MessageId, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.place):
        if record.previous is not None:
            found[record.previous].append(record)
    return found
