"""
Let a busy queue run for long with nothing broken, and judge what grows.

    .venv/bin/python -m faults.soak [--minutes 30] [--rate 200]

One message in ten is left alone, so the tracker redelivers all the time. A line of measures on stderr every 27 s, one
JSON object on stdout at the end, and one line on stderr: PASS, or FAIL with each reason. Exit code 1 where it fails:
the checker of the campaign found a violation, the tracker started its query again, or a measure of `BOUNDS` grew.

Rule 1: the slope of a measure is the median of the slopes between all pairs of samples (Theil and Sen): a spike does
not tilt it. It is believed where the level has risen, too, from the first quarter to the last: a saw-tooth has not.
Rule 2: the first third is warm-up and does not count. A verdict needs enough samples behind it: with fewer it fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from faults.campaign import Campaign
from faults.processes import processes_of
from faults.stage import CALM, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from faults.processes import Tracker, Worker

LEFT_ALONE, LEAST_SAMPLES, WARM_UP, HOUR_S = 0.1, 8, 1 / 3, 3_600.0
SAMPLE_S = 27.0
"""
No multiple of the 10 s after which Spark removes older files of the state (`spark/session.py`). Samples at almost the
same moment of that interval drift slowly through it, and its saw-tooth of 10 s looks like growth for many minutes.
"""

ATTACH_TIMEOUT_S = 20.0
TROUBLE = ("restarting in", "cannot be used", "Ignoring error while performing maintenance")
"""What the tracker's log must not say."""


class Bound(NamedTuple):
    """What a measure may grow by in an hour, and by how much its level moves when nothing grows."""

    an_hour: float
    noise: float


BOUNDS = {
    "python_mib": Bound(an_hour=60, noise=16),
    "jvm_mib": Bound(an_hour=120, noise=48),
    "heap_mib": Bound(an_hour=60, noise=12),
    "client_mib": Bound(an_hour=60, noise=8),
    "files_open": Bound(an_hour=30, noise=12),
    "threads": Bound(an_hour=30, noise=12),
    "checkpoint_files": Bound(an_hour=200, noise=80),
    "checkpoint_kib": Bound(an_hour=20_000, noise=4_000),
    "state_kib": Bound(an_hour=10_000, noise=4_000),
}
"""
The tracker's Python processes and its JVM, resident; the JVM's live heap, after a full collection; the consumer; open
files and threads of the tracker; its checkpoint, in files and bytes, and the state in it, in bytes.
"""


class Growth(NamedTuple):
    """What a measure did behind the warm-up: its level in the first and in the last quarter, and the fitted slope."""

    first: float
    last: float
    an_hour: float
    is_too_much: bool


def growth(times_s: Sequence[float], values: Sequence[float], bound: Bound) -> Growth:
    """Fit a line through the samples behind the warm-up; ValueError where there are too few."""
    at, value = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    counts = at >= at[0] + (at[-1] - at[0]) * WARM_UP if len(at) else at > 0
    at, value = at[counts], value[counts]
    if len(at) < LEAST_SAMPLES:
        raise ValueError(f"too few samples: got {len(at)} behind the warm-up, at least {LEAST_SAMPLES}; run longer")
    quarter = max(1, len(value) // 4)
    one, other = np.triu_indices(len(at), k=1)
    an_hour = float(np.median((value[other] - value[one]) / (at[other] - at[one]))) * HOUR_S
    first, last = float(np.median(value[:quarter])), float(np.median(value[-quarter:]))
    return Growth(
        round(first, 1), round(last, 1), round(an_hour, 1), an_hour > bound.an_hour and last - first > bound.noise
    )


def grown(times_s: Sequence[float], samples: Sequence[Mapping[str, float]]) -> tuple[dict[str, Growth], list[str]]:
    """Return what each measure did, and what is wrong with it."""
    try:
        found = {name: growth(times_s, [each[name] for each in samples], bound) for name, bound in BOUNDS.items()}
    except ValueError as error:
        return {}, [str(error)]
    return found, [
        f"{name} grows by {each.an_hour:g} an hour, bound {BOUNDS[name].an_hour:g}: {each.first:g}, {each.last:g}"
        for name, each in found.items()
        if each.is_too_much
    ]


def sample(tracker: Tracker, worker: Worker) -> dict[str, int]:
    """Measure the tracker, its checkpoint and its consumer."""
    uses = processes_of(tracker.group)
    files = [file for file in tracker.checkpoint.rglob("*") if file.is_file()]
    sizes = {file: _size(file) for file in files}
    return {
        "python_mib": sum(use.resident_mib for use in uses if not use.is_jvm),
        "jvm_mib": sum(use.resident_mib for use in uses if use.is_jvm),
        "heap_mib": sum(_heap_mib(use.pid) for use in uses if use.is_jvm),
        "client_mib": sum(use.resident_mib for use in processes_of(worker.group)),
        "files_open": sum(use.files for use in uses),
        "threads": sum(use.threads for use in uses),
        "checkpoint_files": len(files),
        "checkpoint_kib": sum(sizes.values()) // 1024,
        "state_kib": sum(size for file, size in sizes.items() if "state" in file.parts) // 1024,
    }


def soak(campaign: Campaign, minutes: float, rate: int) -> dict[str, Any]:
    """Run it; return the verdict."""
    profile: dict[str, Any] = {"mode": "receive", "size": 100, "forgotten": LEFT_ALONE, "keep_alive": False}
    stage = Stage(campaign, "soak", max_deliveries=0, **CALM, **profile)
    tracker = stage.tracked()
    stage.send(rate=rate)
    worker = stage.worker("soaks")
    stage.injected("load")
    times_s: list[float] = []
    samples: list[dict[str, int]] = []
    ends_s = time.monotonic() + 60 * minutes
    while (left_s := ends_s - time.monotonic()) > 0 and tracker.is_running and worker.is_running:
        time.sleep(min(SAMPLE_S, left_s))
        times_s.append(time.monotonic())
        samples.append(sample(tracker, worker))
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {samples[-1]}\n")
    stage.drain()
    verdict, (measures, reasons) = stage.verdict(), grown(times_s, samples)
    log = tracker.log.read_text(errors="replace")
    reasons += [f"{log.count(words)} times in the tracker's log: {words}" for words in TROUBLE if words in log]
    reasons += [f"{invariant}: {what}" for invariant, what in verdict.violations]
    # A tracker that redelivered nothing has not been tried.
    reasons += [] if verdict.waits else ["nothing was redelivered"]
    growths = {name: measure._asdict() for name, measure in measures.items()}
    return {"reasons": reasons, "counts": verdict.counts, "growth": growths, "samples": samples}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _heap_mib(pid: int) -> int:
    """Return the same as `live_heap_mib`; 0 for a JVM that has ended meanwhile, as a launcher does."""
    try:
        return live_heap_mib(pid)
    except (OSError, ValueError):
        if Path(f"/proc/{pid}").exists():
            raise
        return 0


def live_heap_mib(pid: int) -> int:
    """
    Return what a JVM's heap holds after a full collection, MiB.

    By HotSpot's attach protocol, as `jcmd` uses it, which a runtime without the development tools lacks.
    """
    asked, answers = Path(f"/tmp/.attach_pid{pid}"), Path(f"/tmp/.java_pid{pid}")  # noqa: S108  # the JVM looks there
    if not answers.exists():
        asked.touch()
        os.kill(pid, signal.SIGQUIT)
        give_up_s = time.monotonic() + ATTACH_TIMEOUT_S
        while not answers.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        asked.unlink(missing_ok=True)
    _ask(answers, "GC.run")
    # One line of the whole heap or one a generation, after the collector.
    used = re.findall(r"total \d+K, used (\d+)K", _ask(answers, "GC.heap_info"))
    if not used:
        raise ValueError(f"cannot read the heap of JVM {pid}: its answer names no used heap")
    return sum(map(int, used)) // 1024


def _ask(answers: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ATTACH_TIMEOUT_S)
        connection.connect(str(answers))
        # Protocol version, command, three arguments.
        connection.sendall(b"".join(part.encode() + b"\0" for part in ("1", "jcmd", command, "", "")))
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")


def main() -> int:
    """Run it and print the verdict; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m faults.soak")
    parser.add_argument("--minutes", type=float, default=30, help="a third of them is warm-up; at least 6")
    parser.add_argument("--rate", type=int, default=200, help="messages a second")
    options = parser.parse_args()
    logging.getLogger("kmq_spark").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), seed=1)
        try:
            verdict = soak(campaign, options.minutes, options.rate)
        finally:
            campaign.close()
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stderr.write("".join(f"FAIL  {reason}\n" for reason in verdict["reasons"]) or "PASS\n")
    return 1 if verdict["reasons"] else 0


if __name__ == "__main__":
    sys.exit(main())
