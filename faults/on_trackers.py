"""Faults of trackers: killed at every step, paused, two at a time, their checkpoint lost, damaged, old or full."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from faults.clocks import HOUR_MS, FalseClock, is_available
from faults.load import finished_messages, messages_in_flight
from faults.stage import KILL_BOUND_S, LOST_CHECKPOINT_BOUND_S, WAYS, Stage
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.processes import Tracker
    from faults.stage import Judged

PASS_TIMEOUT_S = 60.0
"""How long a tracker may take to pass the crash point at which it is to end, its start included."""

UNPASSED = ("tracker.aborting", "tracker.checkpoint-renamed")
"""Points that nothing but a refusal or a damaged checkpoint makes a tracker pass; tests of their own pass them."""

TRACKER_POINTS = tuple(name for name in FAILPOINTS if name.startswith(("tracker.", "ticker.")) and name not in UNPASSED)

AT_START = frozenset({"tracker.opening", "tracker.fenced-older", "tracker.positions-read", "tracker.term-begun"})
"""Passed once in a start; a second passage needs a restarted query."""

START_POINTS = (*sorted(AT_START), "tracker.offsets-added", "tracker.before-commit", "tracker.committed")
IN_TRANSACTION = ("tracker.before-commit", "tracker.message-sent", "tracker.committed")
LONG_STALL_S, DUEL_S = 12.0, 60.0
"""The stall is longer than a transaction may last."""

# Messages that fall due all the time, some of them for the last time, more than one transaction takes.
BUSY: dict[str, Any] = {"mode": "receive", "forgotten": 0.3, "keep_alive": False, "max_in_flight": 400, "work_ms": 300}
RATE = 60
"""Messages a second."""

FENCED_TIMEOUT_S = 40.0
DISK_MIB = 16


def _busy_stage(campaign: Campaign, name: str, rate: int = RATE) -> Stage:
    """Return a queue whose workers forget much: one takes few at a time, one acks in transactions, one as BUSY says."""
    stage = Stage(campaign, name, is_mixed=True, **BUSY)
    stage.send(rate=campaign.rate(rate))
    stage.crew("busy")
    stage.worker("few", size=50)
    stage.worker("jobs", **WAYS["jobs"])
    return stage


def killed(campaign: Campaign) -> Stage:
    """F2: the tracker killed at every crash point, and at random by `kill -9`."""
    stage = _busy_stage(campaign, "f2")
    points = list(TRACKER_POINTS)
    stage.random.shuffle(points)
    # A batch is to take several transactions now and then, at a third of the rate too.
    start = partial(stage.tracker, max_transaction_messages=campaign.rate(100))
    for point in points:
        if point in AT_START:
            # It ends before it works: how long the recovery from the one before it takes, another one shows.
            _kill_after(stage, start(), 0.5)
            _kill_at(stage, start(failpoint=point), point)
        elif not _kill_at(stage, start(failpoint=f"{point}:{stage.random.randint(2, 4)}"), point):
            # Some points are passed rarely: few batches are sent in several transactions.
            _kill_at(stage, start(failpoint=point), point)
    for _ in range(campaign.times(3)):
        _kill_after(stage, start(), stage.random.uniform(0.5, 3.0))
    stage.must_have_passed(TRACKER_POINTS)
    stage.tracked(KILL_BOUND_S)
    stage.drain()
    return stage


def _kill_at(stage: Stage, tracker: Tracker, point: str) -> bool:
    """Wait until a tracker ends at its crash point; return whether it has."""
    timeout_s = PASS_TIMEOUT_S * stage.patience
    if point == "tracker.state-updated":
        # The state function runs in a Python worker of Spark: its end fails the batch, and the driver starts anew.
        is_hit = tracker.until(lambda: tracker.restarts() > 0, timeout_s) and tracker.wait_ready() > 0
        time.sleep(2)
    else:
        is_hit = tracker.wait(timeout_s) == EXIT_CODE
    if is_hit:
        if point not in AT_START:
            # Until its first batch, or until its own crash point where that came before.
            stage.judge_recovery(tracker, tracker.lived_s if (ready_s := tracker.wait_ready(0)) < 0 else ready_s)
        stage.injected("crash point", point=point)
    else:
        stage.notes.append(f"{point} was not passed in time")
    tracker.end()
    return is_hit


def _kill_after(stage: Stage, tracker: Tracker, seconds: float) -> None:
    stage.recovered(tracker)
    time.sleep(seconds)
    tracker.kill()
    stage.injected("kill -9")


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of the tracker, driver and JVM, for up to 15 s; in a transaction, for longer than its time-out."""
    stage = _busy_stage(campaign, "f4-tracker")
    tracker = stage.tracked()
    for seconds in (1, 15, 5)[: campaign.times(3)]:
        time.sleep(2)
        with stage.away():
            tracker.pause()
            time.sleep(seconds)
            tracker.resume()
        stage.injected("SIGSTOP", seconds=seconds)
    for point in IN_TRANSACTION[: campaign.times(len(IN_TRANSACTION))]:
        tracker.stop()
        tracker = stage.tracker(failpoint=f"{point}:{stage.random.randint(2, 4)}:stop")
        with stage.away():
            _stall(stage, tracker, point, LONG_STALL_S)
    stage.drain()
    return stage


def _stall(stage: Stage, tracker: Tracker, point: str, seconds: float) -> None:
    """Wait until a tracker has suspended itself, and wake it up again after some seconds."""
    if not tracker.suspended(PASS_TIMEOUT_S * stage.patience):
        stage.fail(f"crash point {point} suspended no process: {tracker.last_words()}")
        return
    time.sleep(seconds)
    tracker.resume()
    stage.injected("SIGSTOP at a point", point=point, seconds=seconds)


def two_at_once(campaign: Campaign) -> Stage:
    """F5: a second tracker on another checkpoint, and on the same one: the newer wins, the older ends."""
    stage = _busy_stage(campaign, "f5")
    older = stage.tracked(checkpoint="checkpoint-0")
    for number in range(campaign.times(2)):
        with stage.away():
            newer = stage.tracker("checkpoint-0" if number % 2 else f"checkpoint-{number + 1}")
            newer.wait_ready()
            stage.injected("second tracker", same_checkpoint=bool(number % 2))
            must_end_fenced(stage, older)
            if not newer.is_running:
                # Two queries on one checkpoint: Spark itself refuses the one that comes second to a batch.
                stage.notes.append(f"the newer one ended too: {newer.last_words()}")
                newer = stage.tracked(KILL_BOUND_S, checkpoint=f"checkpoint-again-{number}")
        older = newer
    stage.drain()
    return stage


def duel(campaign: Campaign) -> Stage:
    """F5: two trackers, each started again whenever the other one has fenced it, for a minute."""
    stage = _busy_stage(campaign, "f5-duel")
    both: dict[str, Tracker] = {}
    until_s = time.monotonic() + DUEL_S * max(campaign.scale, 0.3)
    with stage.away():
        while time.monotonic() < until_s:
            for name in ("checkpoint-0", "checkpoint-1"):
                if name not in both or not both[name].is_running:
                    both[name] = stage.tracker(name)
                    stage.injected("second tracker", checkpoint=name)
            time.sleep(0.2)
        for tracker in both.values():
            tracker.stop()
    stage.tracked(KILL_BOUND_S, checkpoint="checkpoint-0")
    stage.drain()
    return stage


def stalled(campaign: Campaign) -> Stage:
    """F6: a tracker suspended at each step of its start, for 3 and for 12 s, beside the older one."""
    # A start is to take little longer than its stall: there are fourteen.
    stage = _busy_stage(campaign, "f6-start", rate=20)
    older = stage.tracked(checkpoint="checkpoint-0")
    stalls = [(point, seconds) for point in START_POINTS for seconds in (3.0, LONG_STALL_S)]
    stage.random.shuffle(stalls)
    for number, (point, seconds) in enumerate(stalls[: campaign.times(len(stalls))]):
        newer = stage.tracker(f"checkpoint-{number + 1}", failpoint=f"{point}:1:stop")
        with stage.away():
            _stall(stage, newer, point, seconds)
            must_end_fenced(stage, older)
            if newer.wait_ready() < 0:
                stage.fail(f"I9: the newer tracker did not get ready: {newer.last_words()}")
                newer = stage.tracked(checkpoint=f"checkpoint-{number + 1}-again")
        older = newer
    stage.drain()
    return stage


def zombie(campaign: Campaign) -> Stage:
    """F6: a suspended tracker wakes up after a newer one has taken over."""
    stage = _busy_stage(campaign, "f6")
    older = stage.tracked(checkpoint="checkpoint-0")
    for number in range(campaign.times(2)):
        time.sleep(1 + number * 0.35)
        with stage.away():
            older.pause()
            newer = stage.tracked(KILL_BOUND_S, checkpoint=f"checkpoint-{number + 1}")
        time.sleep(2)
        older.resume()
        stage.injected("SIGCONT of a zombie")
        must_end_fenced(stage, older)
        older = newer
    stage.drain()
    return stage


def must_end_fenced(stage: Stage, tracker: Tracker) -> None:
    """I12: wait until a tracker ends because a newer one has taken over."""
    code = tracker.wait(FENCED_TIMEOUT_S * stage.patience)
    if not code:
        stage.fail(f"I12: the older tracker did not end with an error: exit code {code}")
        tracker.kill()
    elif not tracker.has_said("has taken over; this one ends"):
        stage.fail(f"I12: the older tracker ended without saying why: {tracker.last_words()}")


def lost_checkpoints(campaign: Campaign) -> Stage:
    """F7: the checkpoint deleted, truncated, bit-flipped; F8: an old copy put back."""
    stage = _busy_stage(campaign, "f7")
    tracker = stage.tracked()
    checkpoint, old_copy = stage.folder / "checkpoint", stage.folder / "old-copy"
    shutil.copytree(checkpoint, old_copy, ignore_dangling_symlinks=True, copy_function=_copy_what_is_there)
    damages = (_delete, _put_back_old, _flip_bits, _truncate_state, _truncate_offsets)
    for damage in damages[: campaign.times(len(damages))]:
        time.sleep(4)
        tracker.kill()
        damage(checkpoint, old_copy)
        tracker = stage.tracked(LOST_CHECKPOINT_BOUND_S)
        stage.injected(damage.__name__.strip("_"))
    stage.drain()
    return stage


def _copy_what_is_there(source: str, target: str) -> None:
    # The tracker keeps running while we copy, and removes what it no longer needs.
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


def _delete(checkpoint: Path, _old_copy: Path) -> None:
    shutil.rmtree(checkpoint)


def _put_back_old(checkpoint: Path, old_copy: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(old_copy, checkpoint)


def _flip_bits(checkpoint: Path, _old_copy: Path) -> None:
    for file in _state_files(checkpoint):
        data = bytearray(file.read_bytes())
        for place in range(0, len(data), 37):
            data[place] ^= 0x10
        file.write_bytes(data)


def _truncate_state(checkpoint: Path, _old_copy: Path) -> None:
    for file in _state_files(checkpoint):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _truncate_offsets(checkpoint: Path, _old_copy: Path) -> None:
    newest = max((file for file in checkpoint.glob("*/offsets/*") if file.name.isdigit()), key=lambda f: int(f.name))
    newest.write_bytes(newest.read_bytes()[:20])
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)


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
    stage = Stage(campaign, "f10-tracker", **BUSY)
    stage.send(rate=campaign.rate(RATE))
    stage.worker("busy")
    clocks = (FalseClock(HOUR_MS), FalseClock(-HOUR_MS), FalseClock(0, 0, 20_000, -600_000), FalseClock(rate_ppm=1_000))
    for clock in clocks[: campaign.times(len(clocks))]:
        tracker = stage.tracked(KILL_BOUND_S, clock=clock)
        stage.injected("clock of the tracker", clock=list(clock))
        time.sleep(6)
        tracker.stop()
    stage.tracked()
    stage.drain()
    return stage


def full_disk(campaign: Campaign) -> Stage | None:
    """F17: the file system of a tracker's checkpoint filled under load, then freed."""
    stage = Stage(campaign, "f17-disk", **BUSY)
    disk = stage.folder / "disk"
    if not has_small_disk(stage, disk, DISK_MIB):
        return None
    tracker = stage.tracked(checkpoint="disk")
    stage.send(rate=campaign.rate(RATE))
    stage.worker("busy").wait_working()
    for _ in range(campaign.times(2)):
        restarts = tracker.restarts()
        with stage.away(after_s=LOST_CHECKPOINT_BOUND_S / 2):
            fill(disk / "ballast")
            if not tracker.until(partial(_has_restarted, tracker, restarts), PASS_TIMEOUT_S):
                stage.fail("F17: the tracker says nothing of a full disk")
            (disk / "ballast").unlink()
        stage.injected("disk full")
        time.sleep(3)
    stage.drain()
    return stage


def has_small_disk(stage: Judged, folder: Path, mib: int) -> bool:
    """Mount a file system of this size until the stage is closed; return False where the machine does not allow it."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    if not (mount and umount) or subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    stage.on_close(lambda: subprocess.run([umount, "-l", str(folder)], check=True))
    return True


def fill(ballast: Path) -> None:
    """Add to a file until its file system is full."""
    # Unbuffered, or closing the file would want to write once more.
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))


def _has_restarted(tracker: Tracker, more_than: int) -> bool:
    return tracker.restarts() > more_than


def cold_start(campaign: Campaign) -> Stage:
    """F24: a first tracker on a log of finished messages; F7: a lost checkpoint with many in flight."""
    stage = Stage(campaign, "f24", max_deliveries=0)
    finished, in_flight = campaign.times(500_000, least=50_000), campaign.times(100_000, least=10_000)
    finished_messages(stage, finished)
    tracker = stage.tracked(LOST_CHECKPOINT_BOUND_S)
    stage.injected("cold start", finished=finished)
    time.sleep(3)
    messages_in_flight(stage, in_flight, lease_ms=HOUR_MS)
    time.sleep(3)
    tracker.kill()
    shutil.rmtree(stage.folder / "checkpoint")
    stage.tracked(LOST_CHECKPOINT_BOUND_S)
    stage.injected("lost checkpoint", in_flight=in_flight)
    time.sleep(3)
    stage.end_all()
    return stage
