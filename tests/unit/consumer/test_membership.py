"""A client without a broker; what needs one is tried in tests/kafka/consumer/test_unanswered.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kmq_spark.consumer import membership
from kmq_spark.consumer.fetcher import Fetcher
from kmq_spark.consumer.leases import LeaseTable
from kmq_spark.consumer.membership import LOST_S, Callbacks, CoordinatorContact

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

NO_BROKER = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}


def test_client_is_kept_while_a_new_one_reaches_no_broker_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PROBE_S", 0.2)

    member = Fetcher(NO_BROKER, "orders", 1.0, LeaseTable())._membership
    client = member.client
    assert not member.replace("a test")
    assert member.client is client
    member.leave(5)


def test_callbacks_of_a_replaced_client_do_nothing() -> None:
    called: list[str] = []
    callbacks = Callbacks()
    call: Callable[..., None] = callbacks.wrap(called.append)
    call("before")
    callbacks.end()
    call("after")
    assert called == ["before"]


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
