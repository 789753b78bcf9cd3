"""Derive the queues of a cluster from the names of its topics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_GROUP = re.compile(r"(?P<queue>.+)\.group-(?P<group>[A-Za-z0-9._-]+)")

MARKERS, DEAD_LETTERS = ".markers", ".dlq"


def queues_of(topics: Iterable[str]) -> list[str]:
    """
    Return the queues to which these topics belong, groups as `queue@group`, sorted.

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
        group = _GROUP.fullmatch(base)
        if base in names:
            found.append(base)
        elif group is not None and group["queue"] in names:
            found.append(f"{group['queue']}@{group['group']}")
    return sorted(found)
