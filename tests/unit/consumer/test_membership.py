"""A client without a broker; what needs one is tried in tests/kafka/consumer/test_lost_coordinator.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.consumer import membership
from kmq_spark.consumer.callbacks import Callbacks
from kmq_spark.consumer.fetcher import Fetcher
from kmq_spark.consumer.membership import Handlers, Membership
from kmq_spark.errors import KafkaClientError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_end_offset_asked_of_a_client_that_was_replaced_meanwhile_is_an_error_that_passes() -> None:
    fetcher = Fetcher(NO_BROKER, "orders", lambda _: {})
    fetcher.client.close()
    with pytest.raises(
        KafkaClientError, match=r"end offset of kmq\.queues: the client was replaced; try again"
    ) as raised:
        fetcher.end_of("kmq.queues", 0.1)
    assert raised.value.retriable
