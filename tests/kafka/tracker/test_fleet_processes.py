"""A process of `kmq tracker run --fleet` that loses its JVM; the campaign kills and stops some of three (G6)."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from faults.processes import Tracker, processes_of
from tests.kafka.conftest import wait_until
from tests.kafka.tracker.noting_fleet import Fleet
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kafka.conftest import Queue

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def fleet(bootstrap_servers: str) -> Iterator[Fleet]:
    """A fleet of this test, with the topic that the campaign's trackers coordinate through."""
    with Fleet(bootstrap_servers, topic="") as made:
        made.topic = f"{made.name}.coordination"
        yield made


def test_process_without_a_jvm_ends_and_the_standby_takes_its_queues(
    fleet: Fleet, make_queue: Callable[..., Queue], tmp_path: Path
) -> None:
    """With exit code 1 and one line; the queues are released, so nothing waits for 2T."""
    queues = sorted(make_queue().name for _ in range(2))
    victim = Tracker(queues, fleet.servers, tmp_path, "a", fleet=(fleet.name, "a"))
    try:
        assert victim.wait_for("joined", COMES_S), victim.last_words()
        standby = fleet.process("b", *queues)
        assert victim.wait_for("ready", COMES_S), victim.last_words()
        for process in processes_of(victim.group):
            if process.is_jvm:
                os.kill(process.pid, signal.SIGKILL)
        assert victim.wait(ENDS_S) == 1
        assert wait_until(lambda: standby.running() == queues)
    finally:
        victim.end()
    assert "\nkmq: the JVM of Spark is gone" in victim.log.read_text(errors="replace")
