"""A fleet and a coordination group on a broker with Kafka's own authorizer: what `kmq acls` lists is enough."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kmq_spark.config import load_settings
from kmq_spark.coordination import Coordinator
from kmq_spark.errors import KmqError
from tests.kafka.conftest import wait_until
from tests.kafka.secured import SecuredBroker
from tests.kafka.tracker.noting_fleet import NotingTracker, Process
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

QUEUE, FLEET, GROUP = "orders", "production", "g"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """A broker with a queue and a coordination topic that were made by a user who may make them."""
    folder = tmp_path_factory.mktemp("secured")
    with SecuredBroker.with_queue(
        folder, QUEUE, "tracker", "member", "viewer", options=("--fleet", FLEET, "--group", GROUP)
    ) as broker:
        broker.create("group", "init")
        yield broker


def test_process_of_a_fleet_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    """It joins, adds its queue, gets it assigned and tracks it; the viewer sees that."""
    settings = load_settings(
        None,
        {
            "kafka": {"bootstrap_servers": secured.bootstrap_servers, "extra": secured.credentials("tracker")},
            "tracker": {"queues": (QUEUE,), "fleet": FLEET, "fleet_member": "a"},
        },
    )
    process = Process(settings, FLEET, NotingTracker)
    assert wait_until(lambda: process.running() == [QUEUE] or process.failure is not None)
    assert process.failure is None
    shown = secured.kmq("viewer", "tracker", "fleet", FLEET, "-o", "json")
    assert (shown.exit_code, json.loads(shown.stdout)["queues"][0]["tracked_by"]) == (0, "a"), shown.output
    doctor = secured.kmq("viewer", "doctor", QUEUE, "-o", "json")
    (finding,) = [each for each in json.loads(doctor.stdout) if each["check"] == "fleet"]
    assert "has one process" in finding["what"]
    process.end()
    assert process.failure is None


def test_member_of_a_group_does_its_work_with_what_kmq_acls_lists(secured: SecuredBroker) -> None:
    with Coordinator(
        GROUP, bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials("member"), client_id="a"
    ) as me:
        claim = me.claim("r", COMES_S)
        assert claim is not None
        claim.commit(7, timeout=COMES_S)
        listed = secured.kmq("viewer", "group", "list", "-o", "json")
        assert GROUP in [row["group"] for row in json.loads(listed.stdout)], listed.output


def test_viewer_cannot_pause_a_group(secured: SecuredBroker) -> None:
    """It may read and not write: it follows the group, nothing changes, and the error names what is refused."""
    operator = Coordinator(GROUP, bootstrap_servers=secured.bootstrap_servers, extra=secured.credentials("viewer"))
    operator.watch()
    try:
        with pytest.raises(KmqError, match="AUTHORIZATION_FAILED"):
            operator.pause(60)
        assert not operator.view().paused_until_ms
    finally:
        operator.close()
