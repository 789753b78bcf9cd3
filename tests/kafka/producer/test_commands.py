"""`kmq producer list | forget`, and what the other commands say of resuming producers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer

from kmq_spark.errors import FencedError, TopicError
from kmq_spark.kafka.topics import create_queue_topics
from tests.kafka.conftest import Queue, read_all, set_topic
from tests.kafka.operator.test_commands import checks, kmq
from tests.kafka.producer.test_resuming import producer_of

pytestmark = pytest.mark.kafka


def copy(queue: Queue, *values: str, producer_id: str = "copier") -> None:
    """Send values, the number of each its position, in one life."""
    with producer_of(queue, producer_id) as producer:
        for value in values:
            producer.send(value)
            producer.commit(producer.sequence + 1)


def kmq_json(queue: Queue, *arguments: str) -> tuple[int, Any]:
    """Return exit code and JSON of `kmq producer`."""
    result = kmq(queue.bootstrap_servers, "producer", *arguments, "-o", "json")
    return result.exit_code, json.loads(result.stdout)


def test_list_shows_what_each_producer_has_committed(queue: Queue) -> None:
    copy(queue, "a", "b")
    copy(queue, "c")
    with producer_of(queue, "other") as other:
        other.commit({"file": "x" * 100})
    with producer_of(queue, "raw") as raw:
        raw.commit(b"\x00\xff\x1b")
    code, (first, second, third) = kmq_json(queue, "list", queue.name)
    assert code == 0
    assert (first["id"], first["generation"], first["sequence"], first["position"]) == ("copier", 2, 3, 3)
    assert (second["position"], second["problem"]) == ({"file": "x" * 100}, None)
    assert third["position_hex"] == "00ff1b"
    table = kmq(queue.bootstrap_servers, "producer", "list", queue.name).stdout
    assert table.split()[:3] == ["ID", "GENERATION", "SEQUENCE"]
    assert "0x00ff1b" in table


@pytest.mark.parametrize("options", [["--execute"]])
def test_unknown_producer_or_queue_is_an_error_that_says_where_to_look(queue: Queue, options: list[str]) -> None:
    result = kmq(queue.bootstrap_servers, "producer", "forget", queue.name, "unknown", *options)
    assert result.exit_code == 1
    assert "has no producer 'unknown'" in result.stderr
    assert f"`kmq producer list {queue.name}`" in result.stderr
    missing = kmq(queue.bootstrap_servers, "producer", "forget", "not-there", "p", *options)
    assert (missing.exit_code, "run `kmq queue create not-there`" in missing.stderr) == (1, True)


def test_forget_shows_and_only_with_execute_removes_the_position(queue: Queue) -> None:
    copy(queue, "a")
    shown = kmq(queue.bootstrap_servers, "producer", "forget", queue.name, "copier")
    assert (shown.exit_code, "nothing was written" in shown.stdout) == (0, True)
    assert len(kmq_json(queue, "list", queue.name)[1]) == 1
    code, done = kmq_json(queue, "forget", queue.name, "copier", "--execute")
    assert (code, done["is_forgotten"], done["sequence"]) == (0, True, 1)
    assert kmq_json(queue, "list", queue.name) == (0, [])
    with producer_of(queue) as producer:
        assert (producer.position, producer.sequence) == (None, 0)


def test_producer_that_is_forgotten_while_it_runs_is_fenced(queue: Queue) -> None:
    with producer_of(queue) as producer:
        assert kmq_json(queue, "forget", queue.name, "copier", "--execute")[0] == 0
        producer.send("a")
        with pytest.raises(FencedError, match="its position was forgotten"):
            producer.commit(1)
    assert read_all(queue.bootstrap_servers, queue.name) == []


def test_topic_of_positions_that_deletes_records_is_refused_with_its_repair(queue: Queue) -> None:
    """A position that is gone means that everything is sent again."""
    copy(queue, "a")
    set_topic(queue.bootstrap_servers, f"{queue.name}.producers", "cleanup.policy", "delete")
    repair = "kafka-configs.sh --alter --entity-type topics --entity-name .* --add-config cleanup.policy=compact"
    with pytest.raises(TopicError, match=repair):
        copy(queue, "b")
    with pytest.raises(TopicError, match=repair):
        create_queue_topics(queue.name, bootstrap_servers=queue.bootstrap_servers)
    (finding,) = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json"))["producers"]
    assert finding["level"] == "unhealthy"
    assert "cleanup.policy=delete" in finding["what"]


def test_doctor_reports_a_transaction_that_holds_readers_up(queue: Queue) -> None:
    copy(queue, "a")
    client = Producer({"bootstrap.servers": queue.bootstrap_servers, "transactional.id": f"{queue.name}-hanging"})
    client.init_transactions(30)
    client.begin_transaction()
    client.produce(f"{queue.name}.producers", b"x", b"hanging", partition=0)
    client.flush(30)
    try:
        found = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json"))["producers"]
    finally:
        client.abort_transaction(30)
    assert [(each["level"], "transaction has been open" in each["what"]) for each in found] == [("warning", True)]


def test_record_that_is_no_position_is_reported_and_fails_its_own_id_alone(queue: Queue) -> None:
    copy(queue, "a")
    client = Producer({"bootstrap.servers": queue.bootstrap_servers})
    client.produce(f"{queue.name}.producers", b"not json", b"foreign", partition=0)
    assert client.flush(30) == 0
    _, rows = kmq_json(queue, "list", queue.name)
    assert [(row["id"], bool(row["problem"])) for row in rows] == [("copier", False), ("foreign", True)]
    assert "is not JSON" in kmq(queue.bootstrap_servers, "producer", "list", queue.name).stdout
    copy(queue, "b")
    assert kmq_json(queue, "forget", queue.name, "foreign", "--execute")[0] == 0
    assert len(kmq_json(queue, "list", queue.name)[1]) == 1
