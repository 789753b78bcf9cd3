"""Coordinators of one group for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kmq_spark.coordination import Claim, Coordinator

T = 5_000
"""Heartbeat interval of the groups, milliseconds: a claim is over where a member stands still for that long."""

_numbers = itertools.count()


Make = Callable[..., Coordinator]


@pytest.fixture
def make(bootstrap_servers: str, topic: str) -> Iterator[Make]:
    """Make coordinators of one group that no other test uses; they are closed at the end."""
    group, made = f"group-{next(_numbers)}", []

    def new(client_id: str = "", *, begin: str = "join", **options: Any) -> Coordinator:
        options = {"group": group, "topic": topic, "heartbeat": T / 1000, **options}
        made.append(Coordinator(bootstrap_servers=bootstrap_servers, client_id=client_id, **options))
        if begin:
            getattr(made[-1], begin)()
        return made[-1]

    yield new
    for one in made:
        one.close()


def held(claim: Claim | None) -> Claim:
    """Return a claim that was granted."""
    assert claim is not None
    claim.check()
    return claim
