"""A small campaign on the broker of all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.campaign import Campaign
from tests.brokers import quick_java

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kmq_spark.local.broker import EmbeddedBroker


@pytest.fixture(scope="session")
def campaign(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker) -> Iterator[Campaign]:
    """The least of every fault: one injection of each kind."""
    # Processes of tests share the machine. `make faults` judges times, a test does not.
    folder = tmp_path_factory.mktemp("faults")
    campaign = Campaign(folder, seed=1, scale=0.0, patience=4.0, broker=broker, broker_environment=quick_java())
    try:
        yield campaign
    finally:
        campaign.close()
