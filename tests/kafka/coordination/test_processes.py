"""Holders that are killed or suspended, and a broker that is away: one owner at a time in separate processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kmq_spark.coordination import Coordinator, create_coordination_topic
from tests.brokers import quick_broker
from tests.kafka.conftest import wait_until
from tests.kafka.coordination.conftest import T, held
from tests.limits import COMES_S

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).resolve().parents[3]
_numbers = itertools.count()


class Worker:
    """A process of `coordination_worker.py`, and the lines that it wrote."""

    def __init__(
        self, bootstrap_servers: str, topic: str, group: str, client_id: str, *, file: Path, mode: str
    ) -> None:
        """Start it."""
        self.file = file
        command = [sys.executable, "-m", "tests.kafka.coordination_worker", bootstrap_servers, topic, group, client_id]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([*command, "r", str(T), str(file), mode], cwd=ROOT, env=environment)

    def lines(self, kind: str) -> list[list[str]]:
        """Return the complete lines of one kind, in words."""
        text = self.file.read_text("utf-8") if self.file.exists() else ""
        return [words for line in text.split("\n")[:-1] if (words := line.split())[0] == kind]

    def acts_ms(self) -> list[float]:
        """Return when it was allowed to act."""
        return [float(words[1]) for words in self.lines("act")]

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def workers(bootstrap_servers: str, topic: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start workers of one group, on one resource."""
    group, started = f"workers-{next(_numbers)}", []

    def start(client_id: str, mode: str = "act") -> Worker:
        started.append(Worker(bootstrap_servers, topic, group, client_id, file=tmp_path / client_id, mode=mode))
        return started[-1]

    yield start
    for one in started:
        one.end()


def epochs(worker: Worker) -> list[int]:
    """Return the epochs under which a worker claimed."""
    return [int(words[1]) for words in worker.lines("claimed")]


def test_resource_of_a_killed_holder_is_taken_over(workers: Callable[..., Worker]) -> None:
    """By the other one, with a larger epoch, and after the last act of the first."""
    first = workers("a")
    assert wait_until(lambda: bool(first.acts_ms()))
    second = workers("b")
    assert wait_until(lambda: len(first.acts_ms()) > 100)
    first.end()
    assert wait_until(lambda: bool(second.acts_ms()))
    assert second.acts_ms()[0] > first.acts_ms()[-1]
    assert epochs(second)[0] > epochs(first)[-1]


def test_suspended_holder_does_not_act_when_it_wakes_up(workers: Callable[..., Worker]) -> None:
    """The other has the resource by then: the acts of the two do not overlap, twice over."""
    first = workers("a")
    assert wait_until(lambda: bool(first.acts_ms()))
    second = workers("b")
    for holder, other in ((first, second), (second, first)):
        acts = len(other.acts_ms())
        holder.process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: len(other.acts_ms()) > acts + 20)  # noqa: B023  # called within the loop
        losses = len(holder.lines("lost"))
        holder.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: len(holder.lines("lost")) > losses)  # noqa: B023  # as above
    turns = sorted([(at_ms, "a") for at_ms in first.acts_ms()] + [(at_ms, "b") for at_ms in second.acts_ms()])
    # a until it is suspended, then b, then a.
    assert [name for name, _ in itertools.groupby(name for _, name in turns)] == ["a", "b", "a"]


def test_messages_are_handed_out_at_most_once_whoever_is_killed(workers: Callable[..., Worker]) -> None:
    """Holders are killed at random moments; the next one begins behind what was claimed, and loses a batch at most."""
    running = [workers(f"w{number}", "messages") for number in range(4)]
    deaths = 0
    while len(running) > 1:
        assert wait_until(lambda: any(len(one.lines("message")) > 50 for one in running))  # as above
        holder = max(running, key=lambda one: len(one.lines("message")))
        holder.end()
        running.remove(holder)
        deaths += 1
    (last,) = running
    assert wait_until(lambda: len(last.lines("message")) > 50)
    last.end()
    files = [file.read_text("utf-8").split("\n")[:-1] for file in last.file.parent.iterdir()]
    numbers = [int(line.split()[1]) for lines in files for line in lines if line.startswith("message ")]
    assert len(numbers) == len(set(numbers))
    assert max(numbers) + 1 - len(numbers) <= deaths * 10


def test_broker_that_was_away_leaves_no_resource_behind() -> None:
    """Holds end while it is away; afterwards the resource can be claimed, also by the other member."""
    with quick_broker() as broker:
        servers = broker.bootstrap_servers
        create_coordination_topic(servers, partitions=1)
        with (
            Coordinator("g", bootstrap_servers=servers, client_id="a", heartbeat=T / 1000) as first,
            Coordinator("g", bootstrap_servers=servers, client_id="b", heartbeat=T / 1000) as second,
        ):
            claim = held(first.claim("r"))
            broker.kill()
            assert wait_until(lambda: not claim.is_held)
            broker.start()
            taken = held(second.claim("r", COMES_S))
            assert taken.epoch > claim.epoch
            assert sorted(second.view().members) == ["a", "b"]
            assert first.claim("r") is None
