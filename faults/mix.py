"""
What the workers, the senders and the queue of a fault use besides the defaults, chosen by the seed.

Rule 1: ways of working follow each other in an order that the seed chooses: as many workers as there are ways use each.
Rule 2: what a sender asks for is in its event, so that the checker can compare the record with it.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

from faults.once import TRANSACTION
from faults.protocol import DELAY_MS, TTL_MS
from faults.protocol import LOGICAL_QUEUE as QUEUE

LOGICAL_QUEUE = "emails"
"""The queue without a name is the other one."""

WAYS: dict[str, dict[str, Any]] = {
    # The consumer's own values, but for the lease.
    "defaults": {"isolate_after": 2, "max_in_flight": 1_000, "threads": 8},
    "receive": {"mode": "receive", "max_batch": 50},
    "transaction": {"mode": TRANSACTION, "max_in_flight": 50},
    "many threads": {"threads": 16},
    # Each message of a batch waits for those before it, so batches are small.
    "batches": {"mode": "batch", "max_batch": 25, "threads": 4},
}
"""How a worker may work: fields of its profile, by name."""

DELAYED, EXPIRING, NAMED = 0.05, 0.05, 0.3
"""Shares of messages: with a delay, with a time to live, of the logical queue."""

SHORTEST_S, LONGEST_S = 0.5, 3.0
"""Of delays and times to live."""


class Asked(NamedTuple):
    """What a message asks for: arguments of `send`, and the headers that it must have."""

    options: dict[str, Any]
    headers: dict[str, str]


class Mix:
    """
    The choices of one fault.

    Args:
        seed: Seed of the campaign.
        fault: Name of the fault.
    """

    def __init__(self, seed: int, fault: str) -> None:
        """Choose the order of the ways and the queue's rules."""
        generator = random.Random(f"{seed}:{fault}:mix")  # noqa: S311  # repeatable
        names = list(WAYS)
        generator.shuffle(names)
        self._ways = itertools.cycle(names)
        self.rules: dict[str, Any] = {
            "backoff": generator.choice(("constant", "linear", "exponential")),
            "backoff_initial_ms": 300,
            "backoff_max_ms": 2_000,
            "backoff_jitter": generator.choice((0.0, 0.5)),
            "expired": generator.choice(("drop", "dead-letter")),
        }

    def way(self) -> dict[str, Any]:
        """Return how the next worker works."""
        return WAYS[next(self._ways)]


def ask(generator: random.Random) -> Asked:
    """Return what the next message asks for."""
    wanted, headers = dict[str, Any](), dict[str, str]()
    if generator.random() < NAMED:
        wanted["logical_queue"] = headers[QUEUE] = LOGICAL_QUEUE
    seconds, share = round(generator.uniform(SHORTEST_S, LONGEST_S), 3), generator.random()
    if share < DELAYED:
        wanted["delay"], headers[DELAY_MS] = seconds, str(round(1000 * seconds))
    elif share < DELAYED + EXPIRING:
        wanted["ttl"], headers[TTL_MS] = seconds, str(round(1000 * seconds))
    return Asked(wanted, headers)
