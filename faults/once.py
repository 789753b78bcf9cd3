"""
Results of transactions (I16): a message that is acknowledged in a transaction has its result, and has it once.

Rule 1: a consumer that works in transactions writes an event as it begins. Each of its acks has one result of the same
copy and process, each result one ack: both are committed, or neither is.
Rule 2: what has a result is not redelivered and is no dead letter: the tracker sees the END before the TICK.
Rule 3: a message has one result, and one more for each time that a copy of it was fetched again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from faults.protocol import MarkerType, MessageId, Outcome, place_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from faults.hands import Hands
    from faults.whole import Verdict, Whole

TRANSACTION = "transaction"
"""Mode of the workers that acknowledge in transactions."""

PROCESS = "process"
"""Header of a result: the id of the process that wrote it. Its key is the place of the copy."""


class Result(NamedTuple):
    """Of which copy, and by which process."""

    copy: MessageId | None
    process: str


def check_results(whole: Whole, hands: Hands, fetched_again: Collection[MessageId], verdict: Verdict) -> None:
    """
    I16: each ack in a transaction has its result, each result its ack; a message has one.

    Args:
        whole: Topics.
        hands: What consumers wrote.
        fetched_again: Copies that were, each as often as it was.
        verdict: Takes what is wrong.
    """
    results = Counter(
        Result(place_of(record.key), (record.header(PROCESS) or b"").decode()) for record in whole.dump.results
    )
    verdict.counts["results"] = len(whole.dump.results)
    acks = _acks(hands)
    for one in sorted(results.keys() | acks.keys(), key=str):
        if results[one] != acks[one]:
            what = f"{results[one]} results and {acks[one]} acks in transactions"
            verdict.add("I16", f"{one.copy} has {what} of process {one.process}")
    again = Counter(whole.origin(copy) for copy in fetched_again)
    by_origin: Counter[MessageId] = Counter()
    for copy, _ in results.elements():
        if copy is not None:
            by_origin[whole.origin(copy)] += 1
    for copy in sorted({one.copy for one in results if one.copy is not None}):
        if (copy in whole.copies or copy in whole.letters) and not again[whole.origin(copy)]:
            verdict.add("I16", f"{copy} has a result, and was sent again or is a dead letter")
    for origin, count in sorted(by_origin.items()):
        if count > 1 + again[origin]:
            verdict.add("I16", f"{origin} has {count} results, and was fetched again {again[origin]} times")


def _acks(hands: Hands) -> Counter[Result]:
    """Return the acks of consumers that work in transactions."""
    return Counter(
        Result(copy, process)
        for (copy, process), said in hands.said.items()
        if hands.began.get(process, {}).get("mode") == TRANSACTION
        for one in said
        if one.marker.type is MarkerType.END and one.marker.outcome is Outcome.ACKED
    )
