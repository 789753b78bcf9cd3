"""
A process of a coordination group that writes down each instant at which it was allowed to act.

    python -m faults.member '{"mode": "claims", "bootstrap_servers": …, "topic": …, "group": …, "client_id": …}'

Modes: `claims` claims up to `most` of `resources` resources; `consume` consumes the topic `clicks` in `delivery` mode.
Events: `began`; `act`, with the instant before the check of the claim that passed; `handed`, a message handed out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from faults.events import EventFile
from kmq_spark.coordination import Consumption, Coordinator
from kmq_spark.errors import ClaimLostError, KmqError

if TYPE_CHECKING:
    from kmq_spark.coordination import Claim

ACT_S = 0.02


def now_ms() -> float:
    """Return milliseconds of the host's monotonic clock, the same in every process."""
    return time.monotonic() * 1000


def main(text: str) -> None:
    """Join and act until killed."""
    options: dict[str, Any] = json.loads(text)
    events = EventFile.of_this_process()
    with Coordinator(
        options["group"],
        bootstrap_servers=options["bootstrap_servers"],
        client_id=options["client_id"],
        heartbeat=options["heartbeat_ms"] / 1000,
        topic=options["topic"],
    ) as me:
        events.write("began")
        {"claims": hold, "consume": consume}[options["mode"]](me, events, options)


def hold(me: Coordinator, events: EventFile, options: dict[str, Any]) -> None:
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
        claims = {name: claim for name, claim in claims.items() if act(claim, events)}
        time.sleep(ACT_S)


def act(claim: Claim, events: EventFile) -> bool:
    """Write an act if the claim is held; return whether it is."""
    at_ms = now_ms()
    if not claim.is_held:
        return False
    events.write("act", at_ms=at_ms, resource=claim.resource, epoch=claim.epoch)
    return True


def consume(me: Coordinator, events: EventFile, options: dict[str, Any]) -> None:
    """Consume, and write each message down when it is handed out."""
    mode = options["delivery"]
    with Consumption(me, topic=options["clicks"], mode=mode, max_messages=options["max_messages"]) as batches:
        for batch in batches:
            with contextlib.suppress(ClaimLostError):
                for message in batch:
                    at_ms = now_ms()
                    if mode == "at-least-once":
                        batch.check()
                    place = {"partition": batch.partition, "offset": message.offset(), "epoch": batch.claim.epoch}
                    events.write("handed", at_ms=at_ms, **place)
                time.sleep(ACT_S)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
