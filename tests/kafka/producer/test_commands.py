"""`kmq producer list | show | forget | verify`, and what the other commands say of producers with an id."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from kmq_spark.dlq.dead_letters import redrive
from kmq_spark.errors import FencedError, TopicError
from kmq_spark.kafka.topics import create_queue
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.wire.headers import Sender, sender_of
from tests.brokers import quick_broker
from tests.kafka.conftest import Queue, read_all
from tests.kafka.operator.test_commands import checks, kmq

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka


def copy(queue: Queue, *values: str, producer_id: str = "copier", **options: Any) -> None:
    """Send values, the number of each its position, in one life."""
    with QueueProducer(
        queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id=producer_id, **options
    ) as producer:
        for value in values:
            producer.send(value, position=producer.sequence + 1)
            producer.commit()


def write(queue: Queue, producer_id: str, generation: int, *sequences: int) -> None:
    """Write messages with the headers of a producer, past it: what a defect would leave."""
    client = Producer({"bootstrap.servers": queue.bootstrap_servers})
    for sequence in sequences:
        headers = {"kmq-producer": producer_id, "kmq-generation": str(generation), "kmq-sequence": str(sequence)}
        client.produce(queue.name, b"x", partition=0, headers=headers)  # type: ignore[arg-type]  # a mapping works
    assert client.flush(30) == 0


def kmq_json(queue: Queue, *arguments: str) -> tuple[int, Any]:
    """Return exit code and JSON of `kmq producer`."""
    result = kmq(queue.bootstrap_servers, "producer", *arguments, "-o", "json")
    return result.exit_code, json.loads(result.stdout)


def test_list_shows_what_each_producer_has_committed(queue: Queue) -> None:
    copy(queue, "a", "b")
    copy(queue, "c")
    copy(queue, "d", producer_id="other")
    code, (first, second) = kmq_json(queue, "list", queue.name)
    assert code == 0
    assert (first["id"], first["generation"], first["sequence"], first["position"]) == ("copier", 2, 3, 3)
    assert (second["id"], second["is_unused"], second["problem"]) == ("other", False, None)
    table = kmq(queue.bootstrap_servers, "producer", "list", queue.name)
    assert table.stdout.split()[:3] == ["ID", "GENERATION", "SEQUENCE"]
    assert "unused" not in table.stdout


def test_list_of_a_queue_without_producers_is_empty(queue: Queue) -> None:
    assert kmq_json(queue, "list", queue.name) == (0, [])
    result = kmq(queue.bootstrap_servers, "producer", "list", queue.name)
    assert (result.exit_code, result.stderr) == (0, f"no producer of {queue.name} has an id\n")


def test_producer_that_was_not_used_for_long_is_listed_as_such(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    copy(queue, "a")
    monkeypatch.setenv("KMQ_QUEUE__PRODUCER_RETENTION_MS", "1000")
    monkeypatch.setattr("kmq_spark.cli.producer.time.time", lambda: 4_000_000_000.0)
    _, (found,) = kmq_json(queue, "list", queue.name)
    assert found["is_unused"]
    assert ", unused" in kmq(queue.bootstrap_servers, "producer", "list", queue.name).stdout


def test_show_prints_the_whole_position(queue: Queue) -> None:
    position = {"file": "x" * 100, "line": 7}
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id="copier") as producer:
        producer.commit(position=position)
    assert kmq_json(queue, "show", queue.name, "copier")[1]["position"] == position
    result = kmq(queue.bootstrap_servers, "producer", "show", queue.name, "copier")
    assert (result.exit_code, json.dumps(position) in result.stdout) == (0, True)


def test_position_of_bytes_is_shown_as_hex(queue: Queue) -> None:
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id="copier") as producer:
        producer.commit(position=b"\x00\xff\x1b")
    assert kmq_json(queue, "show", queue.name, "copier")[1]["position_hex"] == "00ff1b"
    assert "0x00ff1b" in kmq(queue.bootstrap_servers, "producer", "list", queue.name).stdout


@pytest.mark.parametrize("command", ["show", "forget", "verify"])
def test_unknown_producer_is_an_error_that_says_where_to_look(queue: Queue, command: str) -> None:
    result = kmq(queue.bootstrap_servers, "producer", command, queue.name, "unknown")
    assert result.exit_code == 1
    assert "has no producer 'unknown'" in result.stderr
    assert f"`kmq producer list {queue.name}`" in result.stderr


@pytest.mark.parametrize("command", ["list", "show", "forget", "verify"])
def test_missing_queue_is_an_error(bootstrap_servers: str, command: str) -> None:
    result = kmq(bootstrap_servers, "producer", command, "not-there", *(["p"] if command != "list" else []))
    assert (result.exit_code, "queue 'not-there' has no topic" in result.stderr) == (1, True)


def test_forget_shows_and_only_with_execute_removes_the_position(queue: Queue) -> None:
    copy(queue, "a")
    dry = kmq(queue.bootstrap_servers, "producer", "forget", queue.name, "copier")
    assert (dry.exit_code, "nothing was written" in dry.stdout) == (0, True)
    assert len(kmq_json(queue, "list", queue.name)[1]) == 1
    code, done = kmq_json(queue, "forget", queue.name, "copier", "--execute")
    assert (code, done["is_forgotten"], done["sequence"]) == (0, True, 1)
    assert kmq_json(queue, "list", queue.name) == (0, [])
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id="copier") as producer:
        assert (producer.position, producer.sequence, producer.generation) == (None, 0, 1)


def test_producer_that_is_forgotten_while_it_runs_is_fenced(queue: Queue) -> None:
    producer = QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers, producer_id="copier")
    assert kmq_json(queue, "forget", queue.name, "copier", "--execute")[0] == 0
    producer.send("a", position=1)
    with pytest.raises(FencedError, match="its position was forgotten"):
        producer.commit()
    with pytest.raises(FencedError):
        producer.close()
    assert read_all(queue.bootstrap_servers, queue.name) == []


def test_verify_of_a_producer_that_was_restarted_finds_nothing_wrong(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue(partitions=3)
    copy(queue, *"abcde")
    copy(queue, *"fg")
    code, found = kmq_json(queue, "verify", queue.name, "copier")
    assert (code, found["is_exact"], found["messages"], found["first"], found["last"]) == (0, True, 7, 1, 7)
    assert [(life["generation"], life["first"], life["last"]) for life in found["generations"]] == [
        (1, 1, 5),
        (2, 6, 7),
    ]
    assert (
        "no hole, no repeat, in order"
        in kmq(queue.bootstrap_servers, "producer", "verify", queue.name, "copier").stdout
    )


def test_verify_finds_holes_and_repeats_and_ends_with_3(queue: Queue) -> None:
    write(queue, "broken", 1, 1, 2, 4, 4, 3, 7)
    code, found = kmq_json(queue, "verify", queue.name, "broken")
    assert code == 3
    assert (found["holes"], found["repeated"], found["out_of_order"]) == ([[5, 6]], [4], 2)
    result = kmq(queue.bootstrap_servers, "producer", "verify", queue.name, "broken")
    assert result.exit_code == 3
    for line in ("MISSING: 2 messages: 5 to 6", "REPEATED: 1 message: 4", "OUT OF ORDER: 2 messages"):
        assert line in result.stdout


def test_verify_finds_messages_that_the_id_has_not_committed(queue: Queue) -> None:
    copy(queue, "a", "b")
    write(queue, "copier", 1, 3)
    code, found = kmq_json(queue, "verify", queue.name, "copier")
    assert (code, found["beyond_position"], found["missing"]) == (3, 1, 0)


def test_verify_does_not_take_removed_messages_for_holes(queue: Queue) -> None:
    from confluent_kafka import TopicPartition  # noqa: PLC0415  # of this test alone

    copy(queue, *"abcd")
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    (third,) = [each for each in read_all(queue.bootstrap_servers, queue.name) if each.value() == b"c"]
    for future in admin.delete_records([TopicPartition(queue.name, 0, third.offset())]).values():
        future.result()
    code, found = kmq_json(queue, "verify", queue.name, "copier")
    assert (code, found["removed_by_retention"], found["first"], found["last"]) == (0, 2, 3, 4)


def bury(queue: Queue) -> None:
    """Write the first message as a dead letter, as the tracker does."""
    record = read_all(queue.bootstrap_servers, queue.name)[0]
    client = Producer({"bootstrap.servers": queue.bootstrap_servers})
    headers = [
        *record.headers(), ("kmq-origin", b"0:0"), ("__dlq.errors.topic", queue.name.encode()),
        ("__dlq.errors.partition", b"0"), ("__dlq.errors.offset", b"0"), ("__dlq.errors.message", b"bad"),
    ]  # fmt: skip
    client.produce(f"{queue.name}.dlq", record.value(), partition=0, headers=headers)
    assert client.flush(30) == 0


def test_redriven_message_keeps_its_sender_and_is_no_repeat(queue: Queue) -> None:
    copy(queue, "a")
    bury(queue)
    assert redrive(queue.name, everything=True, bootstrap_servers=queue.bootstrap_servers).done == 1
    _, again = read_all(queue.bootstrap_servers, queue.name)
    assert sender_of(again.headers()) == Sender("copier", 1, 1)
    assert kmq_json(queue, "verify", queue.name, "copier")[0] == 0


def test_message_that_is_redriven_to_another_queue_has_no_sender_there(make_queue: Callable[..., Queue]) -> None:
    """Its numbers are those of the first queue: a producer of the same id over there has its own."""
    queue, other = make_queue(), make_queue()
    copy(queue, "a")
    copy(other, "b")
    bury(queue)
    redrive(queue.name, everything=True, to=other.name, bootstrap_servers=queue.bootstrap_servers)
    _, moved = read_all(other.bootstrap_servers, other.name)
    assert (moved.value(), sender_of(moved.headers())) == (b"a", None)
    assert kmq_json(other, "verify", other.name, "copier")[0] == 0


def test_message_show_names_the_sender(queue: Queue) -> None:
    copy(queue, "a")
    shown = kmq(queue.bootstrap_servers, "message", "show", queue.name, "0:0").stdout.split()
    assert shown[shown.index("kmq-producer") + 1] == "copier"
    assert shown[shown.index("kmq-sequence") + 1] == "1"


def alter(queue: Queue, topic: str, key: str, value: str) -> None:
    """Set a setting of a topic."""
    entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": queue.bootstrap_servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def test_topic_of_positions_that_deletes_records_is_refused_with_its_repair(queue: Queue) -> None:
    """A position that is gone means that everything is sent again."""
    copy(queue, "a")
    alter(queue, f"{queue.name}.producers", "cleanup.policy", "delete")
    repair = "kafka-configs.sh --alter --entity-type topics --entity-name .* --add-config cleanup.policy=compact"
    with pytest.raises(TopicError, match=repair):
        copy(queue, "b")
    with pytest.raises(TopicError, match=repair):
        create_queue(queue.name, bootstrap_servers=queue.bootstrap_servers)
    (finding,) = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json"))["producers"]
    assert finding["level"] == "unhealthy"
    assert "cleanup.policy=delete" in finding["what"]


def test_doctor_reports_producers(queue: Queue) -> None:
    copy(queue, "a")
    (finding,) = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json"))["producers"]
    assert (finding["level"], finding["what"]) == ("ok", "1 producer id, positions in a compacted topic")


def test_doctor_warns_of_brokers_that_refuse_the_time_out_of_a_sink() -> None:
    """Before the first sink fails to start."""
    with quick_broker(extra={"transaction.max.timeout.ms": "30000"}) as broker:
        create_queue("orders", bootstrap_servers=broker.bootstrap_servers, partitions=1)
        (finding,) = checks(kmq(broker.bootstrap_servers, "doctor", "orders", "-o", "json"))["producers"]
    assert finding["level"] == "warning"
    assert finding["what"].startswith("the brokers have transaction.max.timeout.ms=30000: sinks")


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
