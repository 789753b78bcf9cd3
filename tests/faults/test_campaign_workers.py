"""Consumer processes of the campaign: one that is asked to end as soon as it was started ends without an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from faults.campaign import Campaign

pytestmark = [pytest.mark.faults, pytest.mark.kafka]


def test_worker_ends_cleanly_however_early_it_is_asked_to(campaign: Campaign) -> None:
    """A drain that finds nothing open stops its workers while their interpreters still start."""
    stage = campaign.stage("early-end")
    modes = ("run", "receive", "interrupted")
    workers = [stage.worker(mode, mode=mode) for mode in modes]
    assert dict(zip(modes, [worker.stop() for worker in workers], strict=True)) == dict.fromkeys(modes, 0)


def test_drain_of_an_empty_queue_is_no_violation(campaign: Campaign) -> None:
    stage = campaign.stage("empty")
    stage.drain()
    assert stage.failures == []
