"""
Kill and suspend members of a group: does another ever act at the same time, and how soon is an orphan taken?

    .venv/bin/python -m bench.takeover [seconds] [processes] [resources] [T in ms]

Each process claims up to its share of the resources and a little more, and writes the instant of each act, taken before
`check`, by the host's clock. The driver kills one process after the other (and starts it again under the same client
id), or suspends it for 0.5 T to 5 T. Afterwards, for each resource, the acts under one epoch must end before those
under the next one begin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from kmq_spark.coordination import Claim, Coordinator, create_coordination_topic
from kmq_spark.coordination.session import now_ms
from kmq_spark.errors import KmqError
from kmq_spark.local.broker import EmbeddedBroker

SECONDS, PROCESSES, RESOURCES, T_MS = 120, 10, 50, 1_000
ACT_S = 0.02
BETWEEN_FAULTS_S = (2.0, 5.0)
SETTLE_S = 8.0
GROUP = "takeover"
_CHANCE = random.Random()  # noqa: S311  # which process is next, and when


class Ownership(NamedTuple):
    """The acts of one process on one resource under one epoch."""

    resource: str
    epoch: int
    process: str
    first_ms: float
    last_ms: float


class Death(NamedTuple):
    """A process that was killed."""

    process: str
    at_ms: float


def work(arguments: list[str]) -> None:
    """Claim and act until killed; the process that the driver starts."""
    servers, client_id, file = arguments[0], arguments[1], arguments[5]
    most, resources, t_ms = map(int, arguments[2:5])
    names = [f"r{number}" for number in range(resources)]
    claims: dict[str, Claim] = {}
    with (
        Path(file).open("a", encoding="utf-8", buffering=1) as lines,
        Coordinator(GROUP, bootstrap_servers=servers, client_id=client_id, heartbeat=t_ms / 1000) as me,
    ):
        while True:
            with contextlib.suppress(KmqError):
                for name in _CHANCE.sample(names, len(names)):
                    if len(claims) >= most:
                        break
                    if name not in claims and (claim := me.claim(name)) is not None:
                        claims[name] = claim
            acted = []
            for name, claim in list(claims.items()):
                at_ms = now_ms()
                if claim.is_held:
                    acted.append(f"{at_ms} {name} {claim.epoch}\n")
                else:
                    del claims[name]
            lines.write("".join(acted))
            time.sleep(ACT_S)


class Group:
    """
    The processes.

    Attributes:
        deaths: Those that were killed.
        suspensions: How many were suspended.
    """

    def __init__(self, servers: str, folder: Path, processes: int, resources: int, t_ms: int) -> None:
        """Start them."""
        self._servers, self._folder = servers, folder
        self._most = math.ceil(resources / processes) + 3
        self._resources, self._t_ms = resources, t_ms
        self._started = 0
        self.deaths: list[Death] = []
        self.suspensions = 0
        self._running = {f"p{number}": self._start(f"p{number}") for number in range(processes)}

    def _start(self, client_id: str) -> tuple[str, subprocess.Popen[bytes]]:
        self._started += 1
        name = f"{client_id}-{self._started}"
        numbers = [str(self._most), str(self._resources), str(self._t_ms), str(self._folder / name)]
        command = [sys.executable, "-m", "bench.takeover", "--work", self._servers, client_id, *numbers]
        return name, subprocess.Popen(command)

    def disturb(self) -> None:
        """Kill a process and start it again, or suspend it for a while."""
        client_id = _CHANCE.choice(list(self._running))
        name, process = self._running[client_id]
        if _CHANCE.random() < 0.5:  # noqa: PLR2004  # one of two
            process.kill()
            self.deaths.append(Death(name, now_ms()))
            process.wait()
            time.sleep(_CHANCE.uniform(0, 3) * self._t_ms / 1000)
            self._running[client_id] = self._start(client_id)
            return
        self.suspensions += 1
        process.send_signal(signal.SIGSTOP)
        time.sleep(_CHANCE.uniform(0.5, 5) * self._t_ms / 1000)
        process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill all."""
        for _, process in self._running.values():
            process.kill()
            process.wait()


def ownerships_of(folder: Path) -> list[Ownership]:
    """Return what all processes did, from their files."""
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for file in folder.iterdir():
        for line in file.read_text("utf-8").split("\n")[:-1]:
            at_ms, resource, epoch = line.split()
            key = (resource, int(epoch), file.name)
            first_ms, _ = found.get(key, (float(at_ms), 0.0))
            found[key] = (first_ms, float(at_ms))
    return sorted(Ownership(*key, *times) for key, times in found.items())


def judge(ownerships: list[Ownership], deaths: list[Death]) -> dict[str, Any]:
    """Return overlaps, and how long the resources of killed processes waited, in ms."""
    overlaps, waits_ms = 0, []
    killed_ms = {death.process: death.at_ms for death in deaths}
    for before, after in itertools.pairwise(ownerships):
        if before.resource != after.resource:
            continue
        overlaps += after.first_ms <= before.last_ms or after.epoch == before.epoch
        died_ms = killed_ms.get(before.process)
        # What the process held when it was killed, and not what it had lost before.
        if died_ms is not None and died_ms - before.last_ms < 5 * ACT_S * 1000:
            waits_ms.append(after.first_ms - died_ms)
    return {
        "claims": len(ownerships),
        "overlaps": overlaps,
        "orphans": len(waits_ms),
        "takeover_p50_ms": round(statistics.median(waits_ms)) if waits_ms else None,
        "takeover_max_ms": round(max(waits_ms)) if waits_ms else None,
    }


def main(
    seconds: int = SECONDS, processes: int = PROCESSES, resources: int = RESOURCES, t_ms: int = T_MS
) -> dict[str, Any]:
    """Measure and return everything."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker() as broker:
        create_coordination_topic(broker.bootstrap_servers)
        group = Group(broker.bootstrap_servers, Path(folder), processes, resources, t_ms)
        try:
            time.sleep(SETTLE_S)
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                group.disturb()
                time.sleep(_CHANCE.uniform(*BETWEEN_FAULTS_S))
            time.sleep(3 * t_ms / 1000)
        finally:
            group.end()
        figures = judge(ownerships_of(Path(folder)), group.deaths)
    return {
        "seconds": seconds,
        "processes": processes,
        "resources": resources,
        "t_ms": t_ms,
        "kills": len(group.deaths),
        "suspensions": group.suspensions,
        **figures,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
        os._exit(0)
    sys.stdout.write(json.dumps(main(*map(int, sys.argv[1:]))) + "\n")
