"""Faults of redrive: killed or suspended at every crash point, answers lost; each letter is back in the queue once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from faults.processes import Child, kmq
from faults.proxy import TRANSACTIONAL, ProxiedBroker
from faults.stage import CALM, Stage
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from faults.campaign import Campaign

REDRIVE_POINTS = tuple(name for name in FAILPOINTS if name.startswith("redrive."))
LETTERS, BYTES = 400, 100_000
"""Of so many bytes: more than one transaction takes."""

LIMIT = "30"
"""Letters of a redrive that is to leave some for the next."""

REJECTS: dict[str, Any] = {**CALM, "rejected": 1.0}
TIMEOUT_S = 120.0


def redriven(campaign: Campaign) -> Stage:
    """R1: a redrive killed and suspended at every crash point, its answers lost, and run again until all are back."""
    broker, proxy, other = ProxiedBroker.start(campaign.folder, campaign.broker_environment)
    stage = Stage(campaign, "r1", broker=broker, **REJECTS)
    stage.on_close(proxy.close)
    stage.on_close(other.close)
    all_rejected(stage)
    for point in REDRIVE_POINTS:
        if redrive(stage, point).wait(TIMEOUT_S * stage.patience) == EXIT_CODE:
            stage.injected("crash point", point=point)
        _suspend(stage, point)
    stage.must_have_passed(REDRIVE_POINTS)
    for kind in TRANSACTIONAL:
        proxy.lose_answer(kind)
        redrive(stage, "", "--limit", LIMIT, servers=proxy.address).wait(TIMEOUT_S * stage.patience)
    for _ in range(proxy.lost_count):
        stage.injected("answer lost")
    all_back(stage)
    return stage


def all_rejected(stage: Stage) -> None:
    """Send messages that are all rejected, and wait until all are dead letters."""
    stage.tracked()
    stage.send(rate=0, count=LETTERS, least_bytes=BYTES).join()
    rejects = stage.worker("rejects")
    give_up_s = time.monotonic() + TIMEOUT_S * stage.patience
    while len(stage.dump().dead_letters) < LETTERS and time.monotonic() < give_up_s:
        time.sleep(1)
    rejects.stop()


def all_back(stage: Stage) -> None:
    """Redrive what is left, have it accepted, and judge whether each letter came back once."""
    if (code := redrive(stage).wait(TIMEOUT_S * stage.patience)) != 0:
        stage.fail(f"R: the last redrive ended with {code}: {stage.children[-1].last_words()}")
    stage.worker("accepts", rejected=0.0)
    stage.drain()
    back = [record.origin for record in stage.dump().messages if record.is_redriven]
    if sorted(back) != sorted(letter.origin for letter in stage.dump().dead_letters):
        stage.fail(f"R: {len(back)} messages came back, {len(set(back))} of them different, of {LETTERS} dead letters")


def _suspend(stage: Stage, point: str) -> None:
    """Suspend a redrive at a point while another one does some of its work; the one that wakes up must be fenced."""
    older = redrive(stage, f"{point}:1:stop", "--limit", LIMIT)
    if not older.suspended(TIMEOUT_S * stage.patience):
        stage.fail(f"crash point {point} suspended no redrive: {older.last_words()}")
        return
    code = redrive(stage, "", "--limit", LIMIT).wait(TIMEOUT_S * stage.patience)
    older.resume()
    older.is_ended_by_us = True  # by the newer one
    stage.injected("SIGSTOP at a point", point=point)
    older_code = older.wait(TIMEOUT_S * stage.patience)
    # What was committed before it slept is done: then it may end as usual.
    if code or (not older_code and point != "redrive.committed"):
        stage.fail(f"R: redrive ended with {code}, the older one with {older_code} after {point}: {older.last_words()}")


def redrive(stage: Stage, point: str = "", *arguments: str, servers: str = "") -> Child:
    """Start a redrive."""
    servers = servers or stage.bootstrap_servers
    command = kmq("dlq", "redrive", stage.queue, "--all", "--execute", "--bootstrap-server", servers, *arguments)
    child = Child(command, stage.folder, f"redrive-{len(stage.children)}", failpoint=point)
    stage.children.append(child)
    return child
