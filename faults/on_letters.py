"""Faults of redrive: killed at every crash point; each dead letter is back in the queue once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from faults.processes import Child, kmq
from faults.stage import Stage
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from faults.campaign import Campaign

REDRIVE_POINTS = tuple(name for name in FAILPOINTS if name.startswith("redrive."))
LETTERS, BYTES = 200, 100_000
"""Of so many bytes: more than one transaction takes."""

TIMEOUT_S = 120.0


def redriven(campaign: Campaign) -> Stage:
    """R1: a redrive of dead letters killed at every crash point, and run again until all are back."""
    stage = Stage(campaign, "r1", raised=0.0, poison=0.0, slow=0.0, rejected=1.0)
    stage.tracked()
    stage.send(rate=0, count=LETTERS, least_bytes=BYTES).join()
    rejects = stage.worker("rejects")
    give_up_s = time.monotonic() + TIMEOUT_S * stage.patience
    while len(stage.dump().dead_letters) < LETTERS and time.monotonic() < give_up_s:
        time.sleep(1)
    rejects.stop()
    for point in REDRIVE_POINTS:
        if _redrive(stage, point) == EXIT_CODE:
            stage.injected("crash point", point=point)
    stage.must_have_passed(REDRIVE_POINTS)
    if (code := _redrive(stage)) != 0:
        stage.fail(f"R: the last redrive ended with {code}: {stage.children[-1].last_words()}")
    stage.worker("accepts", rejected=0.0)
    stage.drain()
    back = [record.origin for record in stage.dump().messages if record.is_redriven]
    if sorted(back) != sorted(letter.origin for letter in stage.dump().dead_letters):
        stage.fail(f"R: {len(back)} messages came back, {len(set(back))} of them different, of {LETTERS} dead letters")
    return stage


def _redrive(stage: Stage, point: str = "") -> int | None:
    command = kmq("dlq", "redrive", stage.queue, "--all", "--execute", "--bootstrap-server", stage.bootstrap_servers)
    child = Child(command, stage.folder, f"redrive-{point or 'last'}", failpoint=point)
    stage.children.append(child)
    return child.wait(TIMEOUT_S * stage.patience)
