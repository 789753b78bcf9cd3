"""Who owned what when, written by the ledger from a real coordination topic."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from kmq_spark.config import load_settings
from kmq_spark.coordination import Claim, Coordinator, create_coordination_topic
from kmq_spark.core.coordination.effects import Change
from kmq_spark.errors import TopicError
from kmq_spark.ledger.service import LedgerService
from tests.kafka.conftest import wait_until
from tests.kafka.ledger.test_ledger import kmq
from tests.limits import COMES_S

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from kmq_spark.core.coordination.effects import Effect

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]

T_MS = 2_000


def claims_of(folder: Path) -> list[tuple[int, str, str]]:
    """Return epoch, owner and end of each claim, as `kmq ledger show` does."""
    shown = kmq("show", "ownership", "--ledger-dir", str(folder), "-o", "json")
    assert shown.returncode == 0, shown.stderr
    return [(row["epoch"], row["owner"], row["ended_by"] or "") for row in json.loads(shown.stdout)]


def test_claims_of_a_group_are_written_once_as_its_members_saw_them(
    bootstrap_servers: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Releases, a dead holder, an open claim; nothing is written again after the checkpoint was removed."""
    topic, folder = f"ledger-coordination-{time.time_ns()}", tmp_path / "ledger"
    create_coordination_topic(bootstrap_servers, topic=topic, partitions=2, replication_factor=1)
    settings = load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "tracker": {"coordination_topic": topic},
            "ledger": {"dir": str(folder), "trigger": "available-now", "restart_limit": 0, "coordination": True},
        },
    )
    seen: list[Effect] = []
    first, second = (
        Coordinator(
            "g",
            bootstrap_servers=bootstrap_servers,
            client_id=name,
            heartbeat=T_MS / 1000,
            topic=topic,
            on_change=on_change,
        )
        for name, on_change in (("a", seen.extend), ("b", lambda _effects: None))
    )

    def write() -> dict[str, int]:
        service = LedgerService(spark, [], settings)
        service.run()
        return service.rows

    def claims_seen() -> list[tuple[int, str, str]]:
        """Return the claims according to the first member; a claim that is claimed again is replaced."""
        found: list[tuple[int, str, str]] = []
        for effect in seen:
            if effect.change is Change.CLAIMED:
                if found and not found[-1][2]:
                    found[-1] = (*found[-1][:2], "replaced")
                found.append((effect.epoch, effect.client_id, ""))
            elif effect.change in {Change.RELEASED, Change.LAPSED}:
                found[-1] = (*found[-1][:2], effect.change.value)
        return found

    def claimed(member: Coordinator) -> Claim:
        claim = member.claim("r", COMES_S)
        assert claim is not None
        granted = claim.epoch
        assert wait_until(lambda: granted in [epoch for epoch, _, _ in claims_seen()])
        return claim

    try:
        first.join(COMES_S)
        second.join(COMES_S)
        claimed(first).release()
        claimed(second)
        assert write()["coordination"] >= 4
        second.close(leave=False)
        claimed(first)
    finally:
        first.close()
        second.close()
    assert write()["coordination"] >= 2
    written = claims_of(folder)
    # Of its own last claim, the first member need not have seen the end: it has closed.
    expected = claims_seen()
    assert (written[:-1], written[-1][:2]) == (expected[:-1], expected[-1][:2])
    assert {owner for _, owner, _ in written} == {"a", "b"}
    assert all(ended_by for _, _, ended_by in written)
    shutil.rmtree(folder / "_checkpoints")
    assert write() == {}


def test_coordination_topic_that_does_not_exist_is_an_error(
    bootstrap_servers: str, spark: SparkSession, tmp_path: Path
) -> None:
    """It is not created by accident, and the error names the command."""
    settings = load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": bootstrap_servers},
            "tracker": {"coordination_topic": f"missing-{time.time_ns()}"},
            "ledger": {"dir": str(tmp_path), "coordination": True},
        },
    )
    with pytest.raises(TopicError, match="run `kmq group init`"):
        LedgerService(spark, [], settings).run()
