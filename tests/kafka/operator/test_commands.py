"""The operator's commands on a real broker: their output, and their errors."""

from __future__ import annotations

import json
import os
import pty
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from kmq_spark.cli.main import app
from kmq_spark.core.markers import MarkerType, Outcome
from kmq_spark.inspection.cluster import queues_of
from kmq_spark.producer.producer import QueueProducer
from kmq_spark.wire.headers import DELAY_MS, TTL_MS
from tests.kafka.commands import no_process_outlives_its_test, start  # noqa: F401  # a fixture
from tests.kafka.conftest import Queue, consumer_of, covered, read_all, receive_all, wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.kafka


def kmq(bootstrap_servers: str, *arguments: str, input_: bytes | None = None) -> Result:
    """Run a command in this process, and look that no stack was spilled."""
    result = CliRunner().invoke(
        app, [*arguments, "--bootstrap-server", bootstrap_servers], input=input_, prog_name="kmq"
    )
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def checks(result: Result) -> dict[str, list[dict[str, str]]]:
    """Return the doctor's findings by check."""
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(result.stdout):
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_create_with_other_partitions_than_the_queue_has_is_refused(make_queue: Callable[..., Queue]) -> None:
    """Success would say that there are eight now; without the option the queue is as it was."""
    queue = make_queue(partitions=4)
    again = kmq(queue.bootstrap_servers, "queue", "create", queue.name)
    assert (again.exit_code, "4 partitions\n" in again.stdout) == (0, True)
    for wanted, hint in (
        ("8", f"--alter --topic {queue.name}.markers --partitions 8"),
        ("2", "cannot remove partitions"),
    ):
        result = kmq(queue.bootstrap_servers, "queue", "create", queue.name, "--partitions", wanted)
        assert result.exit_code == 1
        assert f"exists with another number of partitions: got {wanted}; expected 4; " in result.stderr
        assert hint in result.stderr
    describe = kmq(queue.bootstrap_servers, "queue", "describe", queue.name)
    assert "4 partitions" in describe.stdout


def test_sent_messages_have_the_delay_and_the_time_to_live_that_are_asked_for(queue: Queue) -> None:
    sent = kmq(queue.bootstrap_servers, "send", queue.name, "--delay", "2m", "--ttl", "1h", input_=b"one\n")
    assert sent.exit_code == 0, sent.stderr
    (record,) = read_all(queue.bootstrap_servers, queue.name)
    found = dict(record.headers())
    assert (found[DELAY_MS], found[TTL_MS]) == (b"120000", b"3600000")
    refused = kmq(queue.bootstrap_servers, "send", queue.name, "--delay", "soon", input_=b"two\n")
    assert (refused.exit_code, "--delay is not a duration: got 'soon'" in refused.stderr) == (2, True)


def test_peek_shows_what_is_held_and_what_is_ready_escaped_and_takes_nothing(queue: Queue) -> None:
    queue.send("held", "\x1b[31mred\nline", key="k\x07")
    with consumer_of(queue, extra={"client.id": "worker-7"}) as consumer:
        (message,) = receive_all(consumer, 1)
        wait_until(lambda: queue.committed() == {0: 1})
        shown = kmq(queue.bootstrap_servers, "queue", "peek", queue.name)
        rows = json.loads(kmq(queue.bootstrap_servers, "queue", "peek", queue.name, "-o", "json").stdout)
        assert queue.committed() == {0: 1}
        message.ack()
    assert [(row["id"], row["state"], row["consumer_id"]) for row in rows] == [
        ("0:0", "in flight", "worker-7"), ("0:1", "ready", ""),
    ]  # fmt: skip
    assert rows[1]["value"] == "\x1b[31mred\nline"
    assert "\\x1b[31mred\\nline" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "\x07" not in shown.stdout


def test_peek_shows_logical_queue_and_delay_and_no_more_than_asked_for(queue: Queue) -> None:
    """What waits for its time looks as ready as anything else without them."""
    queue.send("a")
    queue.send("b", logical_queue="emails", delay=3_600)
    with consumer_of(queue) as consumer:
        (message,) = receive_all(consumer, 1)
        servers = queue.bootstrap_servers
        one = json.loads(kmq(servers, "queue", "peek", queue.name, "-n", "1", "-o", "json").stdout)
        rows = json.loads(kmq(servers, "queue", "peek", queue.name, "-o", "json").stdout)
        shown = kmq(servers, "queue", "peek", queue.name).stdout
        message.ack()
    assert [row["id"] for row in one] == ["0:0"]
    assert [(row["id"], row["logical_queue"]) for row in rows] == [("0:0", ""), ("0:1", "emails")]
    assert rows[0]["due_at_ms"] is None
    assert rows[1]["due_at_ms"] - time.time() * 1000 > 3_000_000
    assert "LOGICAL QUEUE" in shown
    assert "59 min" in shown


def test_logical_queues_are_counted_by_their_own_groups_and_named_where_nobody_reads_them(queue: Queue) -> None:
    servers, name = queue.bootstrap_servers, queue.name
    queue.send(*"abc", logical_queue="emails")
    queue.send("lost", logical_queue="emial")
    assert kmq(servers, "receive", name, "--logical-queue", "emails", "-n", "2").stdout == "a\nb\n"
    (row,) = (row for row in json.loads(kmq(servers, "queue", "list", "-o", "json").stdout) if row["queue"] == name)
    assert (row["ready"], row["rules_version"]) == (2, None)
    assert re.search(rf"{name} .* never ran +default", kmq(servers, "queue", "list").stdout)
    rows = json.loads(kmq(servers, "queue", "peek", name, "--ready", "-o", "json").stdout)
    assert [(row["value"], row["logical_queue"]) for row in rows] == [("c", "emails"), ("lost", "emial")]
    with consumer_of(queue, logical_queue="emails") as consumer:
        receive_all(consumer, 1)[0].ack()
        queue.send("own")
        with consumer_of(queue) as passes_all:
            receive_all(passes_all, 1)[0].ack()
        assert wait_until(lambda: consumer.receive(1, timeout=0.2) == [] and emails_passed(queue))
        found = kmq(servers, "doctor", name)
    rows = json.loads(kmq(servers, "queue", "peek", name, "--ready", "-o", "json").stdout)
    assert [row["value"] for row in rows] == ["lost"]
    assert "1 message of logical queue emial ready and no consumer of it" in found.stdout
    assert "logical queues: emails (1 consumer, " in found.stdout
    assert "no consumer in kmq." not in found.stdout


def emails_passed(queue: Queue) -> bool:
    """Return whether the groups of both logical queues that are read have passed all messages."""
    return queue.committed(f"kmq.{queue.name}.queue-emails") == queue.committed() == {0: 5}


def test_lines_go_through_a_queue_and_are_acknowledged(queue: Queue) -> None:
    sent = kmq(queue.bootstrap_servers, "send", queue.name, input_=b"one\ntwo\n\xff\xfe\n")
    assert (sent.exit_code, sent.stderr) == (0, f"sent 3 messages to {queue.name}\n")
    receiver = start(queue.bootstrap_servers, "receive", queue.name, "-n", "3")
    out, errors = receiver.communicate(timeout=ENDS_S)
    assert (receiver.returncode, out, errors) == (0, b"one\ntwo\n\xff\xfe\n", b"")
    acked = [offset for each in queue.markers(MarkerType.END) for offset in covered(each.marker)]
    assert sorted(acked) == [0, 1, 2]


def test_receive_escapes_what_a_terminal_would_obey(queue: Queue) -> None:
    """A message's sender could change its title, its colours, or type into it; a pipe gets the bytes as they are."""
    queue.send("\x1b]0;title\x07red\x1b[31m\rdone")
    leader, follower = pty.openpty()
    process = start(queue.bootstrap_servers, "receive", queue.name, "-n", "1", stdout=follower)
    os.close(follower)
    _, errors = process.communicate(timeout=ENDS_S)
    assert (process.returncode, errors) == (0, b"")
    written = os.read(leader, 65_536)
    os.close(leader)
    assert written == b"\\x1b]0;title\\x07red\\x1b[31m\\rdone\r\n"


def test_json_lines_keep_key_value_and_headers(queue: Queue, make_queue: Callable[..., Queue]) -> None:
    """What `receive -o jsonl` writes `send --json` reads: a queue is copied by a pipe."""
    queue.send("plain", key="k", headers=[("traceparent", b"00-4bf9-00f0-01"), ("bin", b"\xff"), ("none", None)])
    receiver = start(queue.bootstrap_servers, "receive", queue.name, "-n", "1", "-o", "jsonl")
    out, _ = receiver.communicate(timeout=ENDS_S)
    copy = make_queue()
    assert kmq(copy.bootstrap_servers, "send", copy.name, "--json", input_=out).exit_code == 0
    with consumer_of(copy) as consumer:
        (message,) = receive_all(consumer, 1)
        assert (message.key, message.value) == (b"k", b"plain")
        assert message.headers == [("traceparent", b"00-4bf9-00f0-01"), ("bin", b"\xff"), ("none", None)]
        message.ack()


def test_line_that_is_no_message_is_reported_by_its_number(queue: Queue) -> None:
    result = kmq(queue.bootstrap_servers, "send", queue.name, "--json", input_=b'{"value": "x"}\n{"headers": 3}\n')
    (error,) = result.stderr.splitlines()
    assert result.exit_code == 2
    assert error.startswith("kmq: line 2 of stdin is not a message: ")
    assert error.endswith("1 lines before it were sent")


def test_receive_into_a_pipe_that_closes_gives_back_what_was_not_written(queue: Queue) -> None:
    """Each line is larger than a pipe holds, so that hardly one can be written without a reader."""
    with QueueProducer(queue.name, bootstrap_servers=queue.bootstrap_servers) as producer:
        for number in range(5):
            producer.send(f"{number}" * 900_000)
    receiver = start(queue.bootstrap_servers, "receive", queue.name)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"0" * 900_000 + b"\n"
    receiver.stdout.close()
    assert receiver.wait(ENDS_S) == 0
    assert receiver.stderr is not None
    assert receiver.stderr.read() == b""
    receiver.stderr.close()
    ends = queue.markers(MarkerType.END)
    acked = [offset for each in ends if each.marker.outcome is Outcome.ACKED for offset in covered(each.marker)]
    given_back = [offset for each in queue.markers(MarkerType.KEEPALIVE) for offset in covered(each.marker)]
    # What fits into a pipe counts as written: one line more, at most, than was read.
    assert acked in ([0], [0, 1])
    started = [offset for each in queue.markers(MarkerType.START) for offset in covered(each.marker)]
    assert sorted(acked + given_back) == started


def test_doctor_of_a_new_queue_finds_it_fit(queue: Queue, tmp_path: Path) -> None:
    """By client properties as Kafka's own tools take them, address included."""
    file = tmp_path / "client.properties"
    file.write_text(
        f"bootstrap.servers={queue.bootstrap_servers}\nsecurity.protocol=PLAINTEXT\nrequest.timeout.ms=9000\n"
    )
    result = CliRunner().invoke(app, ["doctor", queue.name, "--command-config", str(file), "-o", "json"])
    found = checks(result)
    assert (result.exit_code, found["topics"][0]["level"], found["tracker"][0]["level"]) == (0, "ok", "warning")
    assert found["broker"][0]["what"].startswith("1 broker at ")


def test_doctor_looks_at_all_queues_where_none_is_named(
    make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of those that this test has made: other tests have theirs on the same broker."""
    known: set[str] = set()
    monkeypatch.setattr(
        "kmq_spark.inspection.cluster.queues_of", lambda topics: sorted(known.intersection(queues_of(topics)))
    )
    calls, mails = make_queue(), make_queue()
    servers = calls.bootstrap_servers
    assert kmq(servers, "doctor").stdout == "there is no queue; create one with `kmq queue create`\n"
    known |= {calls.name, mails.name}
    found = json.loads(kmq(servers, "doctor", "-o", "json").stdout)
    assert {row["queue"] for row in found} == known
    shown = kmq(servers, "doctor", mails.name, calls.name).stdout
    assert shown.index(f"\n{mails.name}\n") < shown.index(f"\n{calls.name}\n")
    assert f"\n{mails.name}\n" not in kmq(servers, "doctor", mails.name).stdout


def test_doctor_finds_consumers_that_take_nothing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their handlers hang for longer than keep-alive holds messages, or they do not call receive."""
    monkeypatch.setattr("kmq_spark.inspection.findings.SILENT_MS", 1_000)

    def workers() -> list[str]:
        found = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json"))
        return [each["what"] for each in found.get("workers", [])]

    with consumer_of(queue, lease=1, max_lease=1) as consumer:
        assert wait_until(lambda: not consumer.receive(1) and bool(consumer._pipeline.owned))
        queue.send("a", "b")
        assert wait_until(lambda: workers() == ["no message was taken for at least 1.0 s; ready: 2"])
        receive_all(consumer, 2)
        assert workers() == []


def test_doctor_names_the_consumer_that_takes_nothing_beside_one_that_does(
    make_queue: Callable[..., Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its partition stands still."""
    monkeypatch.setattr("kmq_spark.inspection.findings.SILENT_MS", 1_000)
    queue = make_queue(partitions=2)
    with consumer_of(queue) as hung, consumer_of(queue) as busy:
        assert wait_until(lambda: not hung.receive(1) and not busy.receive(1) and len(busy._pipeline.owned) == 1)

        def found() -> list[str]:
            queue.send(*map(str, range(20)))
            busy.receive(5)
            workers = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json")).get("workers", [])
            return [each["what"].partition(";")[0] for each in workers]

        expected = (
            f"no message was taken for at least 1.0 s by {hung.consumer_id}, though there are some in their partitions"
        )
        assert wait_until(lambda: found() == [expected])


def test_doctor_names_the_logical_queue_whose_consumers_take_nothing(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers of the default queue take messages all the time."""
    monkeypatch.setattr("kmq_spark.inspection.findings.SILENT_MS", 1_000)
    with consumer_of(queue) as busy, consumer_of(queue, logical_queue="vip") as hung:
        assert wait_until(lambda: not hung.receive(1) and bool(hung._pipeline.owned))
        queue.send("a", logical_queue="vip")

        def found() -> list[str]:
            queue.send("b", "c")
            receive_all(busy, 1)
            workers = checks(kmq(queue.bootstrap_servers, "doctor", queue.name, "-o", "json")).get("workers", [])
            return [each["what"] for each in workers]

        expected = "no message of logical queue vip was taken for at least 1.0 s; ready: 1"
        assert wait_until(lambda: found() == [expected])


def test_doctor_without_a_broker_is_one_finding_and_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMQ_KAFKA__TIMEOUT", "1")
    result = kmq("127.0.0.1:1", "doctor", "orders", "-o", "json")
    (finding,) = json.loads(result.stdout)
    assert (result.exit_code, finding["check"], finding["level"]) == (3, "broker", "unhealthy")
    assert finding["what"].startswith("cannot reach broker at 127.0.0.1:1")
    assert finding["repair"].startswith("check that the broker runs")


def test_queue_that_does_not_exist_is_one_line(bootstrap_servers: str) -> None:
    """`doctor` has it as a finding, and ends as unhealthy."""
    for command in ("top nope --once", "queue peek nope", "message show nope 0:1", "tracker status nope"):
        result = kmq(bootstrap_servers, *command.split())
        (line,) = result.stderr.splitlines()
        assert (result.exit_code, result.stdout) == (1, ""), command
        assert line.startswith("kmq: queue 'nope' does not exist: there is no topic 'nope'")
        assert "kmq queue create nope" in line
    result = kmq(bootstrap_servers, "doctor", "nope", "-o", "json")
    assert result.exit_code == 3
    assert checks(result)["topics"][0]["repair"] == "kmq queue create nope"


def test_tracker_that_never_ran_is_unhealthy(queue: Queue) -> None:
    result = kmq(queue.bootstrap_servers, "tracker", "status", queue.name)
    assert result.exit_code == 3
    assert f"no tracker of {queue.name} has ever committed; run `kmq tracker run {queue.name}`" in result.stdout


def test_describe_lists_consumers_with_what_they_hold(queue: Queue) -> None:
    assert "  consumers          none\n" in kmq(queue.bootstrap_servers, "queue", "describe", queue.name).stdout
    queue.send("a", "b", "c")
    with consumer_of(queue, logical_queue="vip") as idle, consumer_of(queue) as busy:
        messages = receive_all(busy, 2)
        messages[0].ack()
        busy.flush()
        assert wait_until(lambda: not idle.receive(1) and bool(idle._pipeline.owned))
        found = json.loads(kmq(queue.bootstrap_servers, "queue", "describe", queue.name, "-o", "json").stdout)
        shown = kmq(queue.bootstrap_servers, "queue", "describe", queue.name).stdout
    names = "id", "logical_queue", "partitions", "held"
    assert [tuple(each[name] for name in names) for each in found["consumers"]] == [
        (busy.consumer_id, "", 1, 1), (idle.consumer_id, "vip", 1, 0),
    ]  # fmt: skip
    assert f"    {busy.consumer_id}: 1 partition, holds 1 message for " in shown
    assert f"    {idle.consumer_id} of logical queue vip: 1 partition, holds 0 messages\n" in shown


def test_newest_message_with_a_key_is_shown(queue: Queue) -> None:
    queue.send("first", "second", key="order-13")
    queue.send("other", key="order-14")
    result = kmq(queue.bootstrap_servers, "message", "show", queue.name, "--key", "order-13")
    assert (result.exit_code, result.stderr) == (0, "1 older message with this key: 0:0\n")
    assert "6 bytes: second" in result.stdout
    assert result.stdout.endswith("\nready: no consumer has started it\n")
    result = kmq(queue.bootstrap_servers, "message", "show", queue.name, "--key", "order-15")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"kmq: message with key 'order-15' not found in {queue.name}")


def test_top_counts_what_is_ready_held_and_acknowledged(queue: Queue) -> None:
    queue.send("a", "b", "c")
    with consumer_of(queue) as consumer:
        messages = receive_all(consumer, 2)
        messages[0].ack()
        consumer.flush()
        assert wait_until(lambda: queue.committed() == {0: 2})
        process = start(queue.bootstrap_servers, "top", queue.name, "-o", "jsonl", "--once", "--interval", "0.3")
        out, errors = process.communicate(timeout=ENDS_S)
        messages[1].ack()
    (frame,) = [json.loads(line) for line in out.splitlines()]
    (figures,) = frame["queues"]
    assert (errors, process.returncode, frame["trouble"]) == (b"", 0, "")
    assert (figures["ready"], figures["in_flight"], figures["counted"]["acked"]) == (1, 1, 1)
    assert figures["per_second"]["acked"] == 0
    assert figures["oldest_in_flight_age_ms"] >= 0
