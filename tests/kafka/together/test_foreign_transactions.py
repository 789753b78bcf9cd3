"""Who writes behind an open transaction of somebody else refuses, says why, and goes on once it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.errors import ConfigError, KafkaClientError
from kmq_spark.kafka import log_reader
from kmq_spark.kafka.queue_rules import RULES_TOPIC, checked_rules, write_rules
from tests.kafka.conftest import open_transaction
from tests.kafka.letters import Letters
from tests.kafka.stage import put_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "LSO_WAIT_S", 0.0)


def test_redrive_is_refused_and_sends_no_letter_twice_later(make_queue: Callable[..., Queue]) -> None:
    letters = Letters(make_queue(partitions=2))
    letters.bury(b"a", b"b")
    assert letters.redrive(all=True, limit=1).done == 1
    refused = pytest.raises(KafkaClientError, match=r"cannot read \S+ to its end: .* a transaction is open")
    with open_transaction(letters.queue, letters.topics.redrive_topic), refused:
        letters.redrive(all=True, timeout=5)
    assert letters.redrive(all=True).done == 1
    assert letters.back() == [b"a", b"b"]


def test_change_of_rules_is_refused_and_the_newest_version_is_seen_later(queue: Queue) -> None:
    put_rules(queue.name, queue.bootstrap_servers, 0, max_deliveries=3)
    rules = checked_rules({"max_deliveries": 4})
    with open_transaction(queue, RULES_TOPIC), pytest.raises(KafkaClientError, match="a transaction is open"):
        write_rules(queue.name, rules, expected_version=1, bootstrap_servers=queue.bootstrap_servers, timeout=5)
    with pytest.raises(ConfigError, match="got version 1, expected 0"):
        put_rules(queue.name, queue.bootstrap_servers, 0, max_deliveries=4)
    put_rules(queue.name, queue.bootstrap_servers, 1, max_deliveries=4)
