"""A client without a broker; what needs one is tried in tests/kafka/consumer/test_lost_coordinator.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.consumer import membership
from kmq_spark.consumer.callbacks import Callbacks
from kmq_spark.consumer.membership import Handlers, Membership

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

NO_BROKER = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}


def test_client_is_kept_while_a_new_one_reaches_no_broker_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "PROBE_S", 0.2)

    def ignore(*_: object) -> None:
        """Do nothing."""

    member = Membership(NO_BROKER, "orders", Handlers(ignore, ignore, ignore, ignore, ignore))
    client = member.client
    assert not member.replace()
    assert member.client is client
    member.leave(5, set)


def test_callbacks_of_a_replaced_client_do_nothing() -> None:
    called: list[str] = []
    callbacks = Callbacks()
    call: Callable[..., None] = callbacks.wrap(called.append)
    call("before")
    callbacks.end()
    call("after")
    assert called == ["before"]
