"""Faults of trackers: killed at every step, paused, two at a time, their checkpoint lost, damaged or old."""

from __future__ import annotations

import random
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from faults.clocks import FalseClock, is_available
from faults.load import finished_messages, messages_in_flight
from faults.mix import WAYS
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.processes import TrackerChild
    from faults.stage import Stage

KILL_BOUND_S = 30.0
PASS_TIMEOUT_S = 60.0
"""How long a tracker may take to pass the crash point at which it is to end, its start included."""

LOST_CHECKPOINT_BOUND_S = 60.0
HOUR_MS = 3_600_000

UNPASSED = ("tracker.aborting", "tracker.checkpoint-renamed")
"""Points that nothing but a refusal or a damaged checkpoint makes a tracker pass; tests of their own pass them."""

TRACKER_POINTS = tuple(name for name in FAILPOINTS if name.startswith(("tracker.", "ticker.")) and name not in UNPASSED)

AT_START = frozenset({"tracker.opening", "tracker.fenced-older", "tracker.positions-read", "tracker.signed"})
"""Passed once in a start; a second passage needs a restarted query."""

# Messages that fall due all the time, some of them for the last time, more than one transaction takes.
BUSY: dict[str, Any] = {"mode": "receive", "forgotten": 0.3, "keep_alive": False, "max_in_flight": 400, "work_ms": 300}


RATE = 60
"""Messages a second."""


def _keep_busy(stage: Stage, rate: int) -> None:
    """Send, and let workers forget much: one acks in transactions, one as BUSY says."""
    stage.send(rate=rate)
    if stage.mix is None:
        stage.worker("busy")
        return
    stage.crew("busy")
    stage.worker("receives", max_batch=50)
    stage.worker("transacts", **WAYS["transaction"])


def killed(campaign: Campaign) -> Stage:
    """F2: the tracker killed at every crash point, and at random by `kill -9`."""
    stage = campaign.stage("f2", is_mixed=True, **BUSY)
    generator = random.Random(stage.seed)  # noqa: S311  # repeatable
    jobs = [(point, number) for point in TRACKER_POINTS for number in range(campaign.scaled(2, least=1))]
    jobs += [("", number) for number in range(campaign.scaled(4, least=1))]
    generator.shuffle(jobs)
    _keep_busy(stage, campaign.rate(RATE))
    # A batch is to take several transactions now and then, at a third of the rate too.
    start = partial(stage.tracker, max_transaction_messages=campaign.rate(100))
    for number, (point, _) in enumerate(jobs):
        if point in AT_START and number and campaign.scale:
            # It ends before it works: how long the recovery from the one before it takes, another one shows.
            _kill_one(stage, start, "", 1, after_s=0.5)
        nth = 1 if point in AT_START else generator.randint(2, 5)
        if not _kill_one(stage, start, point, nth, after_s=generator.uniform(0.5, 3.0)):
            # Some points are passed rarely: few batches are sent in several transactions.
            _kill_one(stage, start, point, 1, after_s=0)
    stage.must_have_passed(TRACKER_POINTS)
    recover(stage, stage.tracker())
    stage.drain()
    return stage


def _kill_one(stage: Stage, start: Callable[..., TrackerChild], point: str, nth: int, after_s: float) -> bool:
    """Kill a tracker at a crash point, or after some time without one; return whether that was the end of it."""
    if point:
        tracker = start(failpoint=f"{point}:{nth}", once_file=str(stage.folder / f"once-{time.time_ns()}"))
        # The state function runs in a Python worker of Spark: its end fails the batch, and the driver starts anew.
        wait = partial(_wait_worker_death, tracker) if point == "tracker.state-updated" else tracker.wait
        code = wait(PASS_TIMEOUT_S * stage.patience)
        if code == EXIT_CODE:
            if point not in AT_START:
                _note_recovery(stage, tracker)
            stage.injected("crash point", point=point, nth=nth)
        else:
            stage.notes.append(f"{point}:{nth} was not passed in time")
        if tracker.is_running:
            tracker.kill()
        return code == EXIT_CODE
    tracker = start()
    recover(stage, tracker)
    time.sleep(after_s)
    tracker.kill()
    stage.injected("kill -9")
    return True


def _note_recovery(stage: Stage, tracker: TrackerChild) -> None:
    """Note how long a tracker took until its first batch, or until its own crash point where that came before."""
    ready_s = tracker.wait_ready(0)
    _judge_recovery(stage, tracker.lived_s if ready_s < 0 else ready_s, KILL_BOUND_S, tracker)


def _wait_worker_death(tracker: TrackerChild, timeout_s: float) -> int:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s and tracker.is_running:
        if "restarting in" in tracker.log.read_text(errors="replace"):
            tracker.wait_ready()
            time.sleep(2)
            return EXIT_CODE
        time.sleep(0.2)
    return 0


def recover(stage: Stage, tracker: TrackerChild, bound_s: float = KILL_BOUND_S) -> None:
    """Wait until a tracker does its work; note how long that took, and where it took too long."""
    took_s = tracker.wait_ready()
    if took_s < 0:
        stage.fail(f"I9: the tracker did not get ready: {tracker.last_words()}")
    else:
        _judge_recovery(stage, took_s, bound_s, tracker)


def _judge_recovery(stage: Stage, took_s: float, bound_s: float, tracker: TrackerChild) -> None:
    stage.recovery_s.append(took_s)
    bound_s *= stage.patience
    if took_s > bound_s:
        stage.fail(f"I8: recovery took {took_s:.1f} s, bound {bound_s:g} s: {tracker.last_words()}")


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of the tracker, driver and JVM, for up to 15 s."""
    stage = campaign.stage("f4-tracker", is_mixed=True, **BUSY)
    tracker = stage.tracker()
    recover(stage, tracker)
    _keep_busy(stage, campaign.rate(RATE))
    for seconds in campaign.picked((1, 5, 2, 15), 4, least=1):
        time.sleep(2)
        with stage.away():
            tracker.pause()
            time.sleep(seconds)
            tracker.resume()
        stage.injected("SIGSTOP", seconds=seconds)
    stage.drain()
    return stage


def two_at_once(campaign: Campaign) -> Stage:
    """F5: a second tracker on the same checkpoint, and on another one: the newer wins, the older ends."""
    stage = campaign.stage("f5", is_mixed=True, **BUSY)
    older = stage.tracker("checkpoint-0")
    recover(stage, older)
    _keep_busy(stage, campaign.rate(RATE))
    for number in range(campaign.scaled(4, least=1)):
        with stage.away():
            newer = stage.tracker("checkpoint-0" if number % 2 else f"checkpoint-{number + 1}")
            took_s = newer.wait_ready()
            stage.injected("second tracker", same_checkpoint=bool(number % 2), took_s=took_s)
            _must_end_fenced(stage, older)
            if not newer.is_running:
                # Two queries on one checkpoint: Spark itself refuses the one that comes second to a batch.
                stage.notes.append(f"the newer one ended too: {newer.last_words()}")
                newer = stage.tracker(f"checkpoint-again-{number}")
                recover(stage, newer)
        older = newer
    stage.drain()
    return stage


def zombie(campaign: Campaign) -> Stage:
    """F6: a suspended tracker wakes up after a newer one has taken over."""
    stage = campaign.stage("f6", is_mixed=True, **BUSY)
    older = stage.tracker("checkpoint-0")
    recover(stage, older)
    _keep_busy(stage, campaign.rate(RATE))
    for number in range(campaign.scaled(2, least=1)):
        time.sleep(1 + number * 0.35)
        with stage.away():
            older.pause()
            newer = stage.tracker(f"checkpoint-{number + 1}")
            recover(stage, newer)
        time.sleep(2)
        older.resume()
        stage.injected("SIGCONT of a zombie")
        _must_end_fenced(stage, older)
        older = newer
    stage.drain()
    return stage


def _must_end_fenced(stage: Stage, tracker: TrackerChild) -> None:
    code = tracker.wait(40 * stage.patience)
    if not code:
        stage.fail(f"I12: the older tracker did not end with an error: exit code {code}")
        tracker.kill()
    elif "has taken over" not in tracker.last_words():
        stage.fail(f"I12: the older tracker ended without saying why: {tracker.last_words()}")


def lost_checkpoints(campaign: Campaign) -> Stage:
    """F7: the checkpoint deleted, truncated, bit-flipped; F8: an old copy put back."""
    stage = campaign.stage("f7", is_mixed=True, **BUSY)
    tracker = stage.tracker()
    recover(stage, tracker)
    _keep_busy(stage, campaign.rate(RATE))
    checkpoint, old_copy = stage.folder / "checkpoint", stage.folder / "old-copy"
    shutil.copytree(checkpoint, old_copy, ignore_dangling_symlinks=True, copy_function=_copy_what_is_there)
    damages = (_delete, _truncate_state, _flip_bits, _truncate_offsets, _put_back_old)
    for damage in campaign.picked(damages, len(damages), least=1):
        time.sleep(4)
        tracker.kill()
        damage(checkpoint, old_copy)
        tracker = stage.tracker()
        recover(stage, tracker, LOST_CHECKPOINT_BOUND_S)
        stage.injected(damage.__name__.strip("_"))
    stage.drain()
    return stage


def _copy_what_is_there(source: str, target: str) -> None:
    try:
        shutil.copy2(source, target)
    except FileNotFoundError:
        # The tracker keeps running while we copy, and removes what it no longer needs.
        return


def _delete(checkpoint: Path, _old_copy: Path) -> None:
    shutil.rmtree(checkpoint)


def _truncate_state(checkpoint: Path, _old_copy: Path) -> None:
    for file in _state_files(checkpoint):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip_bits(checkpoint: Path, _old_copy: Path) -> None:
    for file in _state_files(checkpoint):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 37):
            data[place] ^= 0x10
        file.write_bytes(data)


def _truncate_offsets(checkpoint: Path, _old_copy: Path) -> None:
    newest = max((file for file in checkpoint.glob("*/offsets/*") if file.name.isdigit()), key=lambda f: int(f.name))
    newest.write_bytes(newest.read_bytes()[:20])
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)


def _put_back_old(checkpoint: Path, old_copy: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(old_copy, checkpoint)


def _state_files(checkpoint: Path) -> list[Path]:
    found = [file for file in checkpoint.glob("*/state/**/*") if file.is_file() and not file.name.startswith(".")]
    for file in found:
        # Hadoop's own checksums would find it first; damage behind correct checksums is the harder case.
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    return found


def skewed(campaign: Campaign) -> Stage | None:
    """F10: the tracker's host an hour off either way, drifting, stepping."""
    if not is_available():
        return None
    stage = campaign.stage("f10-tracker", **BUSY)
    stage.send(rate=campaign.rate(RATE))
    stage.worker("busy")
    clocks = (FalseClock(HOUR_MS), FalseClock(-HOUR_MS), FalseClock(rate_ppm=1_000), FalseClock(0, 0, 20_000, -600_000))
    for clock in campaign.picked(clocks, len(clocks), least=1):
        tracker = stage.tracker(clock=clock)
        recover(stage, tracker)
        stage.injected("clock of the tracker", clock=list(clock))
        time.sleep(6)
        tracker.stop()
    recover(stage, stage.tracker())
    stage.drain()
    return stage


def cold_start(campaign: Campaign) -> Stage:
    """F24: a first tracker on a log of finished messages; F7: a lost checkpoint with many in flight."""
    stage = campaign.stage("f24", max_deliveries=0)
    finished, in_flight = campaign.scaled(1_000_000, least=50_000), campaign.scaled(100_000, least=10_000)
    finished_messages(stage, finished)
    tracker = stage.tracker()
    recover(stage, tracker, LOST_CHECKPOINT_BOUND_S)
    stage.injected("cold start", finished=finished)
    time.sleep(3)
    messages_in_flight(stage, in_flight, lease_ms=3_600_000)
    time.sleep(3)
    tracker.kill()
    shutil.rmtree(stage.folder / "checkpoint")
    tracker = stage.tracker()
    recover(stage, tracker, LOST_CHECKPOINT_BOUND_S)
    stage.injected("lost checkpoint", in_flight=in_flight)
    time.sleep(3)
    tracker.stop()
    return stage
