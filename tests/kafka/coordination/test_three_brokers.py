"""A group whose partition has three copies: the broker that leads it dies, and the group goes on."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from faults.three_brokers import ThreeBrokers
from kmq_spark.coordination import Coordinator
from kmq_spark.errors import ClaimLostError, KafkaClientError
from tests.brokers import quick_java
from tests.kafka.conftest import wait_until
from tests.kafka.coordination.conftest import T
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kmq_spark.coordination import Claim

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[ThreeBrokers]:
    """Three brokers."""
    made = ThreeBrokers(tmp_path, quick_java())
    try:
        yield made
    finally:
        made.close()


def work(members: list[Coordinator], position: int) -> Claim:
    """Claim the resource by whichever member gets it, and commit a position; again where the claim is lost."""
    until_s = time.monotonic() + COMES_S
    while time.monotonic() < until_s:
        for member in members:
            with contextlib.suppress(ClaimLostError, KafkaClientError):
                claim = member.claim("r", 1)
                if claim is not None:
                    claim.commit(position, timeout=10)
                    return claim
    pytest.fail("no member got the resource")


def test_group_goes_on_after_its_partition_has_moved_to_another_broker(brokers: ThreeBrokers) -> None:
    """With its positions and tasks, and with epochs that only rise; and again when the first leader is back."""
    topic = brokers.coordination_topic("coordination")
    members = [
        Coordinator("g", bootstrap_servers=brokers.bootstrap_servers, client_id=name, heartbeat=T / 500, topic=topic)
        for name in "ab"
    ]
    try:
        for member in members:
            member.join(COMES_S)
        members[0].add_task("t")
        first = work(members[:1], 7)
        node = brokers.kill_leader(topic)
        second = work(members, 9)
        assert second.epoch >= first.epoch
        assert list(members[1].view().tasks) == ["t"]
        brokers.bring_back(node, topic)
        work(members, 9).release()
        third = work(members[::-1], 11)
        assert third.epoch > second.epoch
        assert wait_until(lambda: members[0].view().resources["r"].position == 11)
    finally:
        for member in members:
            member.close()
