"""
A process of a coordination group that writes down each instant at which it was allowed to act.

    python -m faults.member '{"mode": "claims", "bootstrap_servers": …, "topic": …, "group": …, "client_id": …}'

Modes: `claims` claims up to `most` of `resources` resources; `tasks` runs the tasks that the leader assigns to it;
`consume` consumes the topic `clicks` in `delivery` mode.

Lines of the file `file`: `act <ms> <resource> <epoch>`, the instant taken before the check of the claim that passed;
`message <ms> <partition> <offset> <epoch>` for each message that was handed out. Milliseconds of this host's monotonic
clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kmq_spark.coordination import Consumption, Coordinator, RunningTask, TaskRunner
from kmq_spark.errors import ClaimLostError, KmqError

if TYPE_CHECKING:
    from kmq_spark.coordination import Claim

ACT_S = 0.02


def now_ms() -> float:
    """Return milliseconds of the host's monotonic clock, the same in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1000


def main(text: str) -> None:
    """Join and act until killed, or until the standard input ends."""
    options: dict[str, Any] = json.loads(text)
    with (
        Path(options["file"]).open("a", encoding="utf-8", buffering=1) as lines,
        Coordinator(
            options["group"],
            bootstrap_servers=options["bootstrap_servers"],
            client_id=options["client_id"],
            heartbeat=options["heartbeat_ms"] / 1000,
            topic=options["topic"],
        ) as me,
    ):
        sys.stdout.write("joined\n")
        sys.stdout.flush()
        {"claims": hold, "tasks": run_tasks, "consume": consume}[options["mode"]](me, lines, options)


def hold(me: Coordinator, lines: TextIO, options: dict[str, Any]) -> None:
    """Claim what is free, in a random order, and act on what is held."""
    names = [f"r{number}" for number in range(options["resources"])]
    claims: dict[str, Claim] = {}
    while True:
        with contextlib.suppress(KmqError):
            for name in random.sample(names, len(names)):
                if len(claims) >= options["most"]:
                    break
                if name not in claims and (claim := me.claim(name)) is not None:
                    claims[name] = claim
        for name, claim in list(claims.items()):
            if not act(claim, lines):
                del claims[name]
        time.sleep(ACT_S)


def act(claim: Claim, lines: TextIO) -> bool:
    """Write an act if the claim is held; return whether it is."""
    at_ms = now_ms()
    if not claim.is_held:
        return False
    lines.write(f"act {at_ms} {claim.resource} {claim.epoch}\n")
    return True


def run_tasks(me: Coordinator, lines: TextIO, options: dict[str, Any]) -> None:
    """Add the tasks, and run those that are assigned to this process."""
    for number in range(options["tasks"]):
        me.add_task(f"t{number}")

    def handle(task: RunningTask) -> None:
        while not task.stopping.is_set() and act(task.claim, lines):
            time.sleep(ACT_S)

    with TaskRunner(me, handle, retry_delay=0.1):
        while me.failure is None:
            time.sleep(0.1)


def consume(me: Coordinator, lines: TextIO, options: dict[str, Any]) -> None:
    """Consume, and write each message down when it is handed out."""
    options = {"mode": options["delivery"], "max_messages": options["max_messages"], "topic": options["clicks"]}
    with Consumption(me, **options) as batches:
        for batch in batches:
            with contextlib.suppress(ClaimLostError):
                for message in batch:
                    at_ms = now_ms()
                    if options["mode"] == "at-least-once":
                        batch.check()
                    lines.write(f"message {at_ms} {batch.partition} {message.offset()} {batch.claim.epoch}\n")
                time.sleep(ACT_S)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
