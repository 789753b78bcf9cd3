"""A small campaign on the broker of all tests, and on their Spark session where a fault needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.campaign import Campaign
from tests.brokers import quick_java

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kmq_spark.local.broker import EmbeddedBroker


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest, broker: EmbeddedBroker) -> Iterator[Campaign]:
    """
    The least of every fault: one injection of each kind.

    A test with a tracker in this process asks for the fixture `spark`, which makes it run where that session is.
    """
    folder: Path = request.getfixturevalue("tmp_path_factory").mktemp("faults")
    campaign = Campaign(
        folder,
        seed=1,
        scale=0.0,
        # Three processes of tests share the machine. `make faults` judges times, a test does not.
        patience=4.0,
        broker=broker,
        broker_environment=quick_java(),
        spark=lambda: request.getfixturevalue("spark"),
        # A failure that comes once in many runs is found by what it left.
        evidence=folder / "evidence",
    )
    try:
        yield campaign
    finally:
        campaign.close()
