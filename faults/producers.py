"""The answers that producers got, against what the queue topic holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faults.protocol import MessageId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from faults.topics import Record
    from faults.whole import Verdict, Whole


@dataclass(slots=True)
class Sent:
    """
    What producers say.

    Attributes:
        tried: How often each message was given to `send`.
        durable: Place of each confirmed message; None where the event has none.
        asked: What each message asks for: value by header.
        failed: Messages that were reported as failed.
        is_incomplete: Whether some sender could not close in order.
    """

    tried: Counter[str] = field(default_factory=Counter)
    durable: dict[str, MessageId | None] = field(default_factory=dict)
    asked: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    is_incomplete: bool = False

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Sent:
        """Read the events."""
        sent = cls()
        for event in events:
            name = str(event.get("id", ""))
            match event["event"]:
                case "send":
                    sent.tried[name] += 1
                    sent.asked[name] = event.get("asked", {})
                case "sent":
                    sent.durable[name] = MessageId(*event["place"]) if event.get("place") else None
                case "send_failed":
                    sent.failed.add(name)
                case "send_incomplete":
                    sent.is_incomplete = True
        return sent


def check_producers(whole: Whole, events: Sequence[Mapping[str, Any]], verdict: Verdict) -> None:
    """I1, I2, I11: what is durable is in the topic once, as it was sent, where it was acknowledged; nothing else is."""
    sent, firsts = Sent.of(events), _first_copies(whole)
    for name in sorted(sent.durable.keys() - firsts.keys()):
        verdict.add("I1", f"{name} was durable as {sent.durable[name]} and is not in the queue topic")
    for name, records in sorted(firsts.items()):
        for invariant, what in _faults(name, records, sent):
            verdict.add(invariant, what)
    for name in sorted({str(event.get("id", "")) for event in events if event["event"] == "delivered"}):
        if name and name not in sent.tried:
            verdict.add("I2", f"a handler was given {name!r}, which was never sent")
    unknown = len(sent.tried.keys() - sent.durable.keys() - sent.failed)
    verdict.counts["sends_unknown"] = unknown
    if unknown and not sent.is_incomplete:
        verdict.add("I1", f"{unknown} sends have no answer, and every sender was closed in order")


def _faults(name: str, records: Sequence[Record], sent: Sent) -> Iterator[tuple[str, str]]:
    if name not in sent.tried:
        yield "I2", f"{name!r} was never sent"
    elif len(records) > sent.tried[name]:
        yield "I2", f"{name} is in the queue topic {len(records)} times, and was sent {sent.tried[name]} times"
    place = sent.durable.get(name)
    if place is not None and place not in {record.place for record in records}:
        yield "I1", f"{name} was durable as {place}, and is {records[0].place}"
    for header, value in sent.asked.get(name, {}).items():
        for record in records:
            if record.header(header) != value.encode():
                yield "I11", f"{name} was sent with {header} {value!r}, and has {record.header(header)!r}"


def _first_copies(whole: Whole) -> dict[str, list[Record]]:
    """Return the messages as producers sent them, by name, without those that the injector has made and started."""
    started = {
        place
        for partition, each in whole.leases.items()
        for place, starts in each.starts.items()
        if any(whole.is_injected(partition, offset) for offset, _, _ in starts)
    }
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for record in whole.dump.messages:
        if record.previous is None and (record.id or record.place not in started):
            found[record.id].append(record)
    return dict(found)
