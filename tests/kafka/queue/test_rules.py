"""Rules of a queue: written once, read by every tracker, and changed through the log."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kmq_spark.cli.main import app
from kmq_spark.core.delays import shortest_delays_ms
from kmq_spark.core.markers import MarkerType
from kmq_spark.errors import ConfigError
from kmq_spark.kafka.queue_rules import create_queue, read_rules
from kmq_spark.kafka.topics import check_queue
from kmq_spark.tracker.parts import sender_of
from tests.kafka.conftest import Queue, consumer_of, drop, seen, set_topic, settings_of, track, wait_until
from tests.kafka.stage import put_rules
from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from typer.testing import Result


pytestmark = pytest.mark.kafka


def put(queue: Queue, expected_version: int = 0, **rules: object) -> None:
    """Write rules of a queue; those not named have their defaults."""
    put_rules(queue.name, queue.bootstrap_servers, expected_version, **rules)


def test_rules_are_read_as_they_were_written_and_a_stale_change_is_refused(queue: Queue) -> None:
    """Two operators change the rules of one queue: the second change is refused, since the version has changed."""
    assert read_rules(queue.name, bootstrap_servers=queue.bootstrap_servers) is None
    put(queue, max_deliveries=3)
    put(queue, 1, max_deliveries=7, lease=9)
    with pytest.raises(ConfigError, match="got version 2, expected 1"):
        put(queue, 1, max_deliveries=4)
    found = read_rules(queue.name, bootstrap_servers=queue.bootstrap_servers)
    assert found is not None
    assert (found.version, found.rules.max_deliveries, found.lease_s) == (2, 7, 9)


def test_message_keeps_the_backoff_of_its_start_though_a_tracker_without_state_comes_after_the_change(
    queue: Queue,
) -> None:
    """
    The tracker stores what it needs of older rules in the offsets of its group.

    The first tracker folds the START under a backoff of an hour. Then the rules change, and a second tracker begins
    without any state, behind the RULES marker of the first.
    """
    put(queue, backoff="constant", backoff_initial=3_600, backoff_max=3_600)
    assert track(queue).redelivered == 0
    queue.send("a")
    drop(queue, 1)
    assert track(queue).redelivered == 0
    put(queue, 1, backoff="none")
    assert [track(queue).redelivered for _ in range(2)] == [0, 0]
    assert seen(queue) == [b"a"]


def test_change_goes_into_the_log_of_a_tracker_that_runs(make_queue: Callable[..., Queue]) -> None:
    """One RULES marker in every markers partition, whether messages are in flight or not."""
    queue = make_queue(2)
    settings = settings_of(queue)
    sender = sender_of(settings, check_queue(queue.name, bootstrap_servers=queue.bootstrap_servers))
    try:
        sender.open()
        put(queue, max_deliveries=2)

        def versions() -> list[tuple[int, int]]:
            sender.tend({})
            found = queue.markers(MarkerType.RULES)
            return [(each.marker_partition, each.marker.rules.version) for each in found if each.marker.rules]

        assert wait_until(lambda: len(versions()) == 2)
        assert versions() == [(0, 1), (1, 1)]
    finally:
        sender.close()


def kmq(queue: Queue, *arguments: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [*arguments, "--bootstrap-server", queue.bootstrap_servers])


def test_alter_shows_a_change_first_and_writes_it_when_asked_to(queue: Queue) -> None:
    """`describe` shows the rules in force; a change based on an older version is refused."""
    name = queue.name
    assert "none of its own" in kmq(queue, "queue", "describe", name).stdout
    created = kmq(queue, "queue", "create", name, "--max-deliveries", "3", "--lease", "9s")
    assert "rules version 1" in created.stdout
    shown = kmq(queue, "queue", "alter", name, "--max-deliveries", "7")
    assert "--execute --expect-version 1" in shown.stdout
    assert json.loads(kmq(queue, "queue", "describe", name, "-o", "json").stdout)["rules"]["max_deliveries"] == 3
    written = kmq(queue, "queue", "alter", name, "--max-deliveries", "7", "--execute", "-o", "json")
    assert {row["rule"]: (row["now"], row["new"]) for row in json.loads(written.stdout)}["max_deliveries"] == (3, 7)
    rules = json.loads(kmq(queue, "queue", "describe", name, "-o", "json").stdout)["rules"]
    assert (rules["version"], rules["max_deliveries"], rules["lease"]) == (2, 7, 9)
    late = kmq(queue, "queue", "alter", name, "--backoff", "linear", "--execute", "--expect-version", "1")
    assert (late.exit_code, "got version 2, expected 1" in late.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        ((), "no rule is named"),
        (("--max-deliveries", "-1"), "rule max_deliveries of a queue is not allowed: got -1"),
        (("--backoff", "quadratic"), "rule backoff of a queue is not allowed: got 'quadratic'"),
    ],
)
def test_change_that_is_not_allowed_is_one_line(queue: Queue, arguments: tuple[str, ...], finding: str) -> None:
    refused = kmq(queue, "queue", "alter", queue.name, *arguments)
    assert refused.exit_code == 2
    assert finding in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_new_queue_retries_for_longer_than_an_outage_of_ten_minutes(queue: Queue) -> None:
    """Created again it keeps its rules; a subscription has those of its queue, until it is given others."""
    where: Any = {"bootstrap_servers": queue.bootstrap_servers}
    name = f"{queue.name}-new"
    for _ in range(2):
        create_queue(name, **where)
        create_queue(f"{name}@billing", **where)
    stored = read_rules(f"{name}@billing", **where)
    assert stored is not None
    assert (stored.name, stored.rules.version, stored.rules.max_deliveries) == (name, 1, 12)
    waits_ms, _ = shortest_delays_ms(stored.rules.backoff, np.arange(1, stored.rules.max_deliveries))
    # 1 + 2 + 4 + … + 512 s, and 600 s instead of 1,024
    assert int(waits_ms.sum()) == (1_023 + 600) * 1000
    create_queue(f"{name}@audit", rules={"lease": 9}, **where)
    own = read_rules(f"{name}@audit", **where)
    assert own is not None
    assert (own.name, own.lease_s, own.rules.max_deliveries) == (f"{name}@audit", 9, 12)
    with pytest.raises(ConfigError, match="unknown rule of a queue: got \\['leas'\\]"):
        create_queue(name, rules={"leas": 9}, **where)


def test_queue_that_four_processes_create_at_once_has_one_version(queue: Queue) -> None:
    """Each of them succeeds: a deployment may run the command on every host."""
    where: Any = {"bootstrap_servers": queue.bootstrap_servers}
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(create_queue, f"{queue.name}-once", rules={"lease": 9}, **where) for _ in range(4)]
        assert [each.result(COMES_S).partition_count for each in made] == [4] * 4
    stored = read_rules(f"{queue.name}-once", **where)
    assert stored is not None
    assert (stored.rules.version, stored.lease_s) == (1, 9)


def test_create_with_other_rules_than_the_queue_has_is_refused(queue: Queue) -> None:
    """Only `alter` changes rules; `create` with the same rules does nothing."""
    for _ in range(2):
        assert kmq(queue, "queue", "create", queue.name, "--max-deliveries", "3").exit_code == 0
    refused = kmq(queue, "queue", "create", queue.name, "--max-deliveries", "4")
    assert (refused.exit_code, "kmq queue alter" in refused.stderr) == (2, True)


def test_consumer_that_was_given_no_lease_has_the_one_of_its_queue(queue: Queue) -> None:
    """An explicit lease has priority."""
    leases: list[float] = []
    for expected_version, rules in enumerate(({"max_deliveries": 3}, {"lease": 9})):
        put(queue, expected_version, **rules)
        for consumer in (consumer_of(queue), consumer_of(queue, lease=5)):
            leases.append(consumer._limits.lease_s)
            consumer.close()
    assert leases == [30, 5, 9, 5]


def test_queue_topic_on_the_senders_clocks_is_warned_of(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Delays and times to live count from the append time of the first copy; `queue create` sets LogAppendTime."""

    def check() -> None:
        caplog.clear()
        check_queue(queue.name, bootstrap_servers=queue.bootstrap_servers)

    check()
    assert "clocks of the producers" not in caplog.text
    set_topic(queue.bootstrap_servers, queue.name, "message.timestamp.type", "CreateTime")
    check()
    assert "follow the clocks of the producers" in caplog.text
