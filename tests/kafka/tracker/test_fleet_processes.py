"""Processes of `kmq tracker run --fleet`, one of which loses its JVM; the campaign kills and stops some (G6)."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from faults.processes import Tracker, processes_of
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.kafka.conftest import Queue

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def queues(make_queue: Callable[..., Queue]) -> list[Queue]:
    """Two queues of one fleet."""
    return [make_queue(), make_queue()]


@pytest.fixture
def members(queues: list[Queue], tmp_path: Path) -> Iterator[list[Tracker]]:
    """Two processes of the fleet, each with a checkpoint folder of its own as on a machine of its own."""
    names, fleet = [queue.name for queue in queues], f"fleet-{time.time_ns()}"
    made = [
        Tracker(
            names, queues[0].bootstrap_servers, tmp_path, member, checkpoint=tmp_path / member, fleet=(fleet, member)
        )
        for member in ("a", "b")
    ]
    yield made
    for member in made:
        member.end()


def test_process_without_a_jvm_ends_and_the_standby_takes_its_queues(
    queues: list[Queue], members: list[Tracker]
) -> None:
    """With exit code 1 and one line; the queues are released, so nothing waits for 2T."""
    first, second = members
    for member in members:
        assert member.wait_for("joined", COMES_S), member.last_words()
    assert first.wait_for("ready", COMES_S), first.last_words()
    for process in processes_of(first.group):
        if process.is_jvm:
            os.kill(process.pid, signal.SIGKILL)
    assert first.wait(ENDS_S) == 1
    names = {queue.name for queue in queues}
    assert second.until(lambda: {event["queue"] for event in second.events("ready")} == names, COMES_S)
    assert "\nkmq: the JVM of Spark is gone" in first.log.read_text(errors="replace")
