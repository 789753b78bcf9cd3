"""Dead letters on a real broker: listed, sent back exactly once whatever dies, and ended for good."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from kmq_spark import (
    ConfigError,
    DeadLetterFilter,
    FencedError,
    TopicError,
    check_queue,
    redrive,
)
from kmq_spark.core.markers import Outcome
from kmq_spark.dlq import redrive as redrive_module
from kmq_spark.dlq.log import DeadLetterLog
from kmq_spark.dlq.redrive import Redriver, RedriveSummary
from kmq_spark.failpoints import EXIT_CODE, VARIABLE
from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.wire.headers import (
    DELAY_MS,
    DELIVERY_COUNT,
    DLQ_MESSAGE,
    ORIGIN,
    SILENT_COUNT,
    SUBSCRIPTION,
    TTL_MS,
    Headers,
)
from tests.kafka.conftest import Queue, consumer_of, delete_topics, read_all, receive_all
from tests.kafka.letters import Letters

pytestmark = pytest.mark.kafka


@pytest.fixture
def letters(make_queue: Callable[..., Queue]) -> Letters:
    """A queue of two partitions without letters."""
    return Letters(make_queue(partitions=2))


@pytest.fixture
def small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two letters a transaction."""
    monkeypatch.setattr(redrive_module, "MAX_TRANSACTION_MESSAGES", 2)


def test_one_dead_letter_goes_back_and_is_open_no_more(letters: Letters) -> None:
    letters.bury(b"a", b"b", b"c")
    summary = letters.redrive(ids=["0:1"])
    assert (summary.done, summary.by_reason) == (1, {"no such customer": 1})
    assert letters.back() == [b"b"]
    assert letters.open_values() == [b"a", b"c"]
    assert letters.ends() == [(Outcome.ACKED, ["0:1"])]


def test_redriven_message_is_delivered_as_new_with_its_origin(letters: Letters) -> None:
    """Count, times and TTL start again: otherwise a redriven message could expire at once."""
    ours: Headers = [(TTL_MS, b"1"), (DELAY_MS, b"9"), (SILENT_COUNT, b"4"), (SUBSCRIPTION, b"old")]
    letters.bury(b"a", partition=1, headers=ours)
    letters.redrive(all=True)
    (record,) = read_all(letters.bootstrap_servers, letters.queue.name)
    assert (record.partition(), record.key(), record.value()) == (1, b"k", b"a")
    assert [name for name, _ in record.headers() or []] == ["app", ORIGIN, "kmq-first-sent-ms"]
    with consumer_of(letters.queue) as consumer:
        (message,) = receive_all(consumer, 1)
        assert message.delivery_count == 1
        message.ack()


def test_filter_redrives_what_it_lets_through_and_nothing_else(letters: Letters) -> None:
    where = DeadLetterFilter(logical_queue="emails", key="k2", dead_after=datetime(2020, 1, 1, tzinfo=UTC))
    letters.bury(b"a")
    letters.bury(b"t", key=b"k2", partition=1, headers=[("kmq-logical-queue", b"emails")])
    assert letters.open_values(where=where) == [b"t"]
    assert letters.redrive(where=where).done == 1
    assert letters.back() == [b"t"]


def test_all_are_redriven_in_transactions_of_bounded_size(letters: Letters, small_transactions: None) -> None:
    letters.bury(*(b"%d" % number for number in range(5)))
    letters.bury(b"5", partition=1)
    summary = letters.redrive(all=True)
    assert summary.done == 6
    assert [names for _, names in letters.ends()] == [["0:0", "0:1"], ["0:2", "0:3"], ["0:4"], ["1:0"]]
    assert sorted(letters.back()) == [b"0", b"1", b"2", b"3", b"4", b"5"]  # type: ignore[type-var]  # no None here
    assert letters.redrive(all=True).done == 0


def test_limit_stops_and_the_next_call_goes_on(letters: Letters) -> None:
    letters.bury(b"a", b"b", b"c")
    assert [letters.redrive(all=True, limit=2).done for _ in range(2)] == [2, 1]
    assert letters.back() == [b"a", b"b", b"c"]


def test_letters_that_are_done_or_missing_are_reported(letters: Letters) -> None:
    letters.bury(b"a")
    letters.redrive(ids=["0:0"])
    summary = letters.redrive(ids=["0:0", "0:7", "9:0"])
    assert (summary.done, summary.done_before, sorted(summary.missing)) == (0, 1, ["0:7", "9:0"])
    assert letters.back() == [b"a"]


def test_what_is_no_message_or_has_no_payload_is_left_reported_and_can_be_purged(letters: Letters) -> None:
    letters.bury(b"junk", reason="cannot read marker", source_topic=letters.topics.markers_topic)
    letters.bury(None, key=None, reason="payload gone", sent_at_ms=-1)
    letters.bury(None, key=b"tombstone")
    summary = letters.redrive(all=True)
    assert (summary.done, summary.left) == (1, 2)
    assert (
        summary.left_because["0:0"] == f"no message of the queue: it was set aside from {letters.topics.markers_topic}"
    )
    assert "no payload" in summary.left_because["0:1"]
    assert letters.purge(all=True).done == 2
    assert letters.open_values() == []


def test_too_large_for_the_queue_is_left_and_does_not_hold_up_the_others(letters: Letters) -> None:
    big = b"x" * 1_070_000  # above the queue topic's limit, below that of its dead letters
    letters.bury(b"a", big, b"c")
    summary = letters.redrive(all=True)
    assert (summary.done, summary.left) == (2, 1)
    assert "too large" in summary.left_because["0:1"]
    assert letters.back() == [b"a", b"c"]
    assert letters.open_values() == [big]


def test_other_queue_gets_it_by_key_without_a_foreign_origin(
    letters: Letters, make_queue: Callable[..., Queue]
) -> None:
    other = make_queue(partitions=1)
    letters.bury(b"a", partition=1)
    letters.redrive(all=True, to=other.name)
    (record,) = read_all(letters.bootstrap_servers, other.name)
    assert (record.value(), dict(record.headers() or [])) == (b"a", {"app": b"x"})
    assert letters.back() == []


def test_group_redrives_its_own_letters_to_itself(letters: Letters) -> None:
    """Its topics are its own, its message names it, and the queue's own letters stay."""
    name = f"{letters.queue.name}@billing"
    layout = create_queue_topics(name, bootstrap_servers=letters.bootstrap_servers, partitions=7)
    assert (layout.partition_count, layout.dead_letter_partition_count, layout.redrive_partition_count) == (2, 2, 2)
    group = Letters(letters.queue, name)
    letters.bury(b"mine")
    group.bury(b"theirs")
    assert group.redrive(all=True).done == 1
    (record,) = read_all(letters.bootstrap_servers, letters.queue.name)
    assert (record.value(), dict(record.headers() or [])[SUBSCRIPTION]) == (b"theirs", b"billing")
    assert letters.open_values() == [b"mine"]


def test_purged_letters_are_ended_and_removed_below_the_lowest_open_one(letters: Letters) -> None:
    letters.bury(b"a", b"b", b"c")
    assert letters.purge(ids=["0:0", "0:2"]).done == 2
    assert letters.ends() == [(Outcome.EXPIRED, ["0:0", "0:2"])]
    assert letters.open_values() == [b"b"]
    left = read_all(letters.bootstrap_servers, letters.topics.dead_letter_topic)
    assert [record.value() for record in left] == [b"b", b"c"]
    letters.redrive(all=True)
    assert letters.purge(all=True).done == 0
    assert read_all(letters.bootstrap_servers, letters.topics.dead_letter_topic) == []
    letters.bury(b"d")
    assert letters.open_values() == [b"d"]


def test_killed_redrive_is_run_again_and_every_letter_is_back_exactly_once(letters: Letters) -> None:
    """With a commit unheard of; R1 of the campaign has the other points."""
    # two transactions of 8 MiB
    values = [b"%d" % number + b"x" * 100_000 for number in range(100)]
    letters.bury(*values[:80])
    letters.bury(*values[80:], partition=1)
    killed = letters.run("redrive", "--all", "--execute", **{VARIABLE: "redrive.committed"})
    assert killed.returncode == EXIT_CODE, killed.stderr
    done = letters.run("redrive", "--all", "--execute", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert Counter(letters.back()) == Counter(values)
    assert letters.open_values() == []
    assert sorted(name for _, names in letters.ends() for name in names) == sorted(
        [f"0:{number}" for number in range(80)] + [f"1:{number}" for number in range(len(values) - 80)]
    )


def test_second_redrive_at_the_same_time_fences_the_first(letters: Letters, small_transactions: None) -> None:
    """The first ends with a clear error, the second does the rest, and nothing goes back twice."""
    letters.bury(b"0", b"1", b"2", b"3", b"4")
    layout = check_queue(letters.name, bootstrap_servers=letters.bootstrap_servers)
    summary = RedriveSummary()
    reach: dict[str, Any] = {"bootstrap_servers": letters.bootstrap_servers, "timeout": 10}
    older = Redriver(layout, to=letters.topics, to_partition_count=2, topic_id="", **reach)

    def overtaken() -> Iterator[Any]:
        log = DeadLetterLog(layout, **reach)
        for number, letter in enumerate(log.letters(log.state().bounds)):
            if number == 3:  # in the middle of its second transaction
                assert letters.redrive(all=True).done == 3
            yield letter

    with closing(older), pytest.raises(FencedError, match=r"fenced after 2 dead letters: another redrive or purge"):
        older.run(overtaken(), summary)
    assert letters.back() == [b"0", b"1", b"2", b"3", b"4"]


def test_ends_past_the_end_of_a_topic_without_its_id_are_refused(letters: Letters) -> None:
    """A broker that has no topic ids: the letters of the new topic would pass for done."""
    letters.bury(b"a", b"b")
    layout = check_queue(letters.name, bootstrap_servers=letters.bootstrap_servers)
    reach: dict[str, Any] = {"bootstrap_servers": letters.bootstrap_servers, "timeout": 10}
    log = DeadLetterLog(layout, **reach)
    with closing(Redriver(layout, to=letters.topics, to_partition_count=2, topic_id="", **reach)) as redriver:
        redriver.run(log.letters(log.state().bounds), RedriveSummary())
    create_again(letters)
    letters.bury(b"new")
    with pytest.raises(TopicError, match="was deleted and created again, delete"):
        letters.open_values()


def create_again(letters: Letters) -> None:
    """Delete the dead-letter topic and create it again."""
    delete_topics(letters.bootstrap_servers, letters.topics.dead_letter_topic)
    create_queue_topics(letters.name, bootstrap_servers=letters.bootstrap_servers, partitions=2)


def test_letters_of_a_topic_that_was_created_again_are_open_and_none_is_deleted_unseen(letters: Letters) -> None:
    """The ENDs of the old topic would hide as many of the new letters, and a purge delete them."""
    letters.bury(b"a", b"b", b"c")
    assert letters.redrive(all=True).done == 3
    create_again(letters)
    letters.bury(*(b"%d" % number for number in range(5)))
    assert letters.open_values() == [b"0", b"1", b"2", b"3", b"4"]
    rows = json.loads(letters.kmq("list", "-o", "json").stdout)
    assert len(rows) == 5
    assert letters.purge(ids=["0:4"]).done == 1
    assert letters.redrive(all=True).done == 4
    assert letters.redrive(all=True).done == 0
    assert letters.back() == [b"a", b"b", b"c", b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "choose dead letters: got nothing"),
        ({"ids": ["0:0"], "all": True}, "got ids and all"),
        ({"all": True, "limit": 0}, "limit is not allowed: got 0; expected at least 1"),
    ],
)
def test_bad_value_is_reported_before_a_broker_is_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=None) as raised:
        redrive("orders", bootstrap_servers="127.0.0.1:1", **options)
    assert message in str(raised.value)


def test_unknown_queue_is_reported_with_the_command_that_makes_it(letters: Letters) -> None:
    with pytest.raises(TopicError, match="run `kmq queue create nowhere`"):
        redrive("nowhere", bootstrap_servers=letters.bootstrap_servers, all=True)
    with pytest.raises(TopicError, match="there is no topic 'nowhere' to redrive to"):
        letters.redrive(all=True, to="nowhere")


def test_commands_show_what_they_would_do_then_do_it(letters: Letters) -> None:
    letters.bury(b"a\x1b[31m\n", reason="no such customer\x07", key=b"\xff\x00")
    listed = letters.kmq("list")
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert "0:0" in listed.stdout
    assert "no such customer\\x07" in listed.stdout
    assert "0xff00" in listed.stdout
    shown = letters.kmq("list", "--id", "0:0")
    assert "7 bytes: a\\x1b[31m\\n" in shown.stdout
    assert DLQ_MESSAGE in shown.stdout
    as_json = json.loads(letters.kmq("list", "--id", "0:0", "-o", "jsonl").stdout)
    assert (as_json["value"], as_json["key_hex"], as_json["id"]) == ("a\x1b[31m\n", "ff00", "0:0")
    assert DELIVERY_COUNT in {header["name"] for header in as_json["headers"]}
    dry = letters.kmq("redrive", "--reason", "customer")
    assert "would redrive 1 dead letter," in dry.stdout
    assert "add --execute" in dry.stdout
    assert letters.back() == []
    assert "redriven 1 dead letter" in letters.kmq("redrive", "--id", "0:0", "--execute").stdout
    assert letters.back() == [b"a\x1b[31m\n"]
    missing = letters.kmq("redrive", "--id", "0:9", "--execute")
    assert missing.exit_code == 1
    assert "no open dead letter" in missing.stderr
    assert "no open dead letters of" in letters.kmq("list").stderr


def test_list_ends_with_the_number_of_all_dead_letters_by_reason(letters: Letters) -> None:
    letters.bury(b"a", reason="late")
    letters.bury(b"b", b"c", reason="no such customer", partition=1)
    whole = letters.kmq("list", "--limit", "2").stdout.splitlines()
    assert [line.split()[0] for line in whole[:3]] == ["ID", "0:0", "1:0"]
    assert whole[3:] == [
        "", "3 dead letters, 2 are shown; --limit shows more", "         2  no such customer", "         1  late",
    ]  # fmt: skip
    assert letters.kmq("list", "--reason", "late").stdout.splitlines()[2:] == ["", "1 dead letter", "         1  late"]
    assert len(json.loads(letters.kmq("list", "--limit", "2", "-o", "json").stdout)) == 2
