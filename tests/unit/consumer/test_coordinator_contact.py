"""When a client counts as one that has lost its coordinator for good."""

from __future__ import annotations

import json

from kmq_spark.consumer.coordinator_contact import LOST_S, CoordinatorContact


def statistics(at_s: float, state: str) -> str:
    """Return what the client reports, as far as it is read."""
    return json.dumps({"ts": round(at_s * 1e6), "cgrp": {"state": state, "join_state": "init"}})


def test_client_is_lost_after_a_time_without_coordinator() -> None:
    contact = CoordinatorContact()
    assert not contact.is_lost
    for at_s, state, is_lost in [
        (100.0, "init", False), (100.0 + LOST_S - 1, "query-coord", False), (100.0 + LOST_S, "wait-coord", True),
    ]:  # fmt: skip
        contact.observe(statistics(at_s, state))
        assert contact.is_lost is is_lost


def test_coordinator_that_is_found_again_begins_anew() -> None:
    contact = CoordinatorContact()
    contact.observe(statistics(0.0, "query-coord"))
    contact.observe(statistics(LOST_S - 1, "up"))
    contact.observe(statistics(LOST_S, "query-coord"))
    contact.observe(statistics(2 * LOST_S - 1, "wait-broker-transport"))
    assert not contact.is_lost
    contact.observe(statistics(2 * LOST_S, "query-coord"))
    assert contact.is_lost
    contact.observe(statistics(3 * LOST_S, "up"))
    assert not contact.is_lost


def test_statistics_that_come_late_count_by_their_own_time() -> None:
    """A handler that runs for minutes polls nothing, and then gets the statistics of all that time at once."""
    contact = CoordinatorContact()
    contact.observe(statistics(0.0, "wait-coord"))
    assert not contact.is_lost
    contact.observe(statistics(5.0, "up"))
    assert not contact.is_lost
