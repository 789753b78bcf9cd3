"""Derive the queues of a cluster from the names of its topics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SUBSCRIPTION = re.compile(r"(?P<queue>.+)\.subscription-(?P<subscription>[A-Za-z0-9._-]+)")

MARKERS, DEAD_LETTERS = ".markers", ".dlq"


def queues_of(topics: Iterable[str]) -> list[str]:
    """
    Return the queues to which these topics belong, subscriptions as `queue@subscription`, sorted.

    Args:
        topics: Names of all topics of a cluster.

    A dead-letter topic also has a markers topic, the redrive topic. It is not a queue of its own.
    """
    names = set(topics)
    found = []
    for name in names:
        base = name.removesuffix(MARKERS)
        if base == name:
            continue
        if base.endswith(DEAD_LETTERS) and f"{base.removesuffix(DEAD_LETTERS)}{MARKERS}" in names:
            continue
        subscription = _SUBSCRIPTION.fullmatch(base)
        if base in names:
            found.append(base)
        elif subscription is not None and subscription["queue"] in names:
            found.append(f"{subscription['queue']}@{subscription['subscription']}")
    return sorted(found)
