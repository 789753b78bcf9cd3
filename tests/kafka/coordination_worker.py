"""
A process that holds a resource of a group and writes a line each time that it was allowed to act.

    python -m tests.kafka.coordination_worker <servers> <topic> <group> <client id> <resource> <T in ms> <file> <mode>

Lines of both modes: `claimed <epoch>`; `lost <monotonic ms>` when a call failed, then it claims again.
Mode `act`: `act <monotonic ms> <epoch>` for each check that passed, the instant taken before the check.
Mode `messages`: `message <number>` for each message that was handed out, at most once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from kmq_spark.coordination import Claim, Coordinator
from kmq_spark.coordination.session import now_ms
from kmq_spark.errors import ClaimLostError

PAUSE_S = 0.002


BATCH = 10


def main(arguments: list[str]) -> None:
    """Claim and act until killed."""
    bootstrap_servers, topic, group, client_id, resource, t_ms, file, mode = arguments
    with (
        Path(file).open("a", encoding="utf-8", buffering=1) as lines,
        Coordinator(
            group, bootstrap_servers=bootstrap_servers, topic=topic, client_id=client_id, heartbeat=int(t_ms) / 1000
        ) as me,
    ):
        while True:
            claim = me.claim(resource, 60)
            if claim is None:
                continue
            lines.write(f"claimed {claim.epoch}\n")
            try:
                while True:
                    (hand_out if mode == "messages" else act)(claim, lines)
                    time.sleep(PAUSE_S)
            except ClaimLostError:
                lines.write(f"lost {now_ms()}\n")


def act(claim: Claim, lines: TextIO) -> None:
    """Act on the resource."""
    at_ms = now_ms()
    claim.check()
    lines.write(f"act {at_ms} {claim.epoch}\n")


def hand_out(claim: Claim, lines: TextIO) -> None:
    """Hand out the next messages, which are numbers here, at most once."""
    first = claim.position or 0
    claim.claim_messages(first + BATCH)
    lines.write("".join(f"message {number}\n" for number in range(first, first + BATCH)))


if __name__ == "__main__":
    main(sys.argv[1:])
