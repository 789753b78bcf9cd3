"""`kmq group …` on a real broker: what the commands show, what they change, and how they refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.coordination import Coordinator
from kmq_spark.inspection.groups import read_groups
from tests.kafka.conftest import wait_until
from tests.kafka.coordination.conftest import T
from tests.kafka.operator.test_commands import kmq
from tests.limits import COMES_S

if TYPE_CHECKING:
    from typer.testing import Result

pytestmark = pytest.mark.kafka


class Group:
    """A group of one test."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.name, self.servers, self.topic = f"group-{time.time_ns()}", bootstrap_servers, topic
        self._made: list[Coordinator] = []

    def member(self, client_id: str, *, heartbeat: float = T / 1000, **options: Any) -> Coordinator:
        """Join."""
        one = Coordinator(
            self.name,
            bootstrap_servers=self.servers,
            topic=self.topic,
            client_id=client_id,
            heartbeat=heartbeat,
            **options,
        )
        one.join()
        self._made.append(one)
        return one

    def kmq(self, verb: str, *arguments: str) -> Result:
        """Run a command about this group."""
        return kmq(self.servers, "group", verb, self.name, *arguments, "--topic", self.topic)

    def kmq_json(self, verb: str, *arguments: str) -> Any:  # noqa: ANN401  # JSON
        """Run a command that succeeds, and return its JSON."""
        result = self.kmq(verb, *arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def close(self) -> None:
        """Close the members."""
        for one in self._made:
            one.close()


@pytest.fixture
def group(bootstrap_servers: str, topic: str) -> Iterator[Group]:
    """A group of this test."""
    made = Group(bootstrap_servers, topic)
    yield made
    made.close()


def with_work(group: Group) -> Coordinator:
    """Let a member `a` hold `clicks/0` at position 7 and run the task `orders`."""
    member = group.member("a", metadata=b"host 1")
    member.add_task("orders", b"payload")
    assert member.wait_for(lambda world: world.tasks["orders"].client_id == "a", COMES_S)
    claim = member.claim("clicks/0", COMES_S)
    assert claim is not None
    claim.commit(7, timeout=COMES_S)
    assert member.claim("orders", COMES_S) is not None
    return member


def test_list_shows_each_group_of_the_topic(group: Group) -> None:
    member = with_work(group)
    result = kmq(group.servers, "group", "list", "--topic", group.topic, "-o", "json")
    (row,) = [row for row in json.loads(result.stdout) if row["group"] == group.name]
    shown = {name: row[name] for name in ("state", "members", "stale", "held", "tasks", "leader", "heartbeat_ms")}
    assert shown == {
        "state": "active", "members": 1, "stale": 0, "held": 2, "tasks": 1, "leader": "a", "heartbeat_ms": T,
    }  # fmt: skip
    assert row["generation"] == member.view().generation
    table = kmq(group.servers, "group", "list", "--topic", group.topic).stdout
    assert table.split()[:3] == ["GROUP", "STATE", "MEMBERS"]
    assert group.name in table


def test_describe_shows_members_tasks_resources_and_findings(group: Group) -> None:
    """As JSON and as tables; exit code 0: nothing is wrong."""
    member = with_work(group)
    member.add_task("emails", b"\xff\x00")
    assert member.claim("emails", COMES_S) is not None
    found = group.kmq_json("describe")
    assert {each["resource"]: each["epoch"] for each in found["resources"]} == {
        name: resource.epoch for name, resource in member.view().resources.items()
    }
    (clicks,) = [each for each in found["resources"] if each["resource"] == "clicks/0"]
    assert (clicks["holder"], clicks["position"], found["is_complete"]) == ("a", 7, True)
    (row,) = found["member_rows"]
    assert (row["client_id"], row["is_leader"], row["is_stale"], row["metadata"]) == ("a", True, False, "host 1")
    assert row["held"] == ["clicks/0", "emails", "orders"]
    emails, orders = found["task_rows"]
    assert (orders["assigned_to"], orders["held_by"], orders["payload"]) == ("a", "a", "payload")
    assert (emails["task"], emails["payload_hex"]) == ("emails", "ff00")
    checks = [each["check"] for each in found["findings"]]
    assert checks == ["topic", "members", "leader", "tasks", "snapshots"]
    printed = group.kmq("describe").stdout
    assert "clicks/0" in printed
    assert "0xff00" in printed
    assert "\nhealthy" in printed


def test_group_without_a_live_member_is_unhealthy(group: Group) -> None:
    """Silent for more than 2T, although no record has dropped it yet; with what to do and exit code 3."""
    group.member("a", heartbeat=1).close(leave=False)
    assert wait_until(lambda: group.kmq("describe").exit_code == 3)
    found = json.loads(group.kmq("describe", "-o", "json").stdout)
    (row,) = found["member_rows"]
    assert (found["state"], row["is_stale"], row["silent_ms"] > 2_000) == ("empty", True, True)
    (finding,) = [each for each in found["findings"] if each["check"] == "members"]
    assert (finding["level"], finding["repair"]) == ("unhealthy", "start the group's processes")
    assert finding["what"].startswith("no live member: silent are a for ")
    assert "start the group's processes" in group.kmq("describe").stdout


def test_topic_that_does_not_fit_is_named_with_its_repair(group: Group) -> None:
    """No group is read then; the same where it does not exist."""
    group.topic = f"group-describe-{time.time_ns()}"
    missing = group.kmq("describe", "-o", "json")
    (finding,) = json.loads(missing.stdout)
    assert (missing.exit_code, finding["what"]) == (3, f"coordination topic {group.topic} does not exist")
    assert finding["repair"] == f"kmq group init --topic {group.topic}"
    admin = AdminClient({"bootstrap.servers": group.servers})
    settings = {"message.timestamp.type": "CreateTime", "cleanup.policy": "compact"}
    (made,) = admin.create_topics([NewTopic(group.topic, 1, 1, config=settings)]).values()
    made.result()
    found = group.kmq("describe", "-o", "json")
    assert (found.exit_code, [each["check"] for each in json.loads(found.stdout)]) == (3, ["topic", "topic"])


@pytest.mark.parametrize("arguments", [("describe",), ("pause", "--end"), ("pause", "--for", "10m")])
def test_group_without_records_is_an_error(group: Group, arguments: tuple[str, ...]) -> None:
    """A name with a typing error must not look like a group without members; nothing is written."""
    result = group.kmq(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"kmq: no group {group.name!r} in {group.topic}; `kmq group list` shows the groups\n"
    assert not read_groups(group.servers, topic=group.topic, group=group.name)


def test_pause_lets_holders_stop_and_its_end_lets_them_claim_again(group: Group) -> None:
    member = with_work(group)
    claim = member.claims["clicks/0"]
    asked_ms = int(time.time() * 1000)
    paused = group.kmq_json("pause", "--for", "10m")
    assert paused["held"] == []
    assert asked_ms <= paused["paused_until_ms"] - 600_000 <= time.time() * 1000
    assert not claim.is_held
    assert json.loads(group.kmq("describe", "-o", "json").stdout)["state"] == "paused"
    assert member.claim("clicks/0") is None
    assert group.kmq_json("pause", "--end")["paused_until_ms"] is None
    assert member.claim("clicks/0", COMES_S) is not None
    again = group.kmq("pause", "--end")
    assert again.exit_code == 1
    assert "RESUME_GROUP changed nothing" in again.stderr


def test_duration_that_is_not_allowed_is_refused(group: Group) -> None:
    """Eight days are above the longest pause; nothing is written."""
    with_work(group)
    for text in ("", "0s", "-1s", "1.5 h", "10 minutes", "8d"):
        result = group.kmq("pause", f"--for={text}")
        assert result.exit_code in {1, 2}, text
        assert result.stderr.startswith("kmq: "), text
    assert group.kmq_json("describe")["state"] == "active"


def test_seek_shows_the_change_before_it_writes_it(group: Group) -> None:
    """Without --execute nothing is written; each refusal says what to do next."""
    member = with_work(group)
    dry = group.kmq("seek", "clicks/0", "--to", "3")
    assert dry.exit_code == 0
    assert f"pause the group first: kmq group pause {group.name} --for 10m" in dry.stdout
    refused = group.kmq("seek", "clicks/0", "--to", "3", "--execute")
    assert refused.exit_code == 1
    assert "SET_POSITION changed nothing" in refused.stderr
    assert group.kmq_json("pause", "--for", "1h")["held"] == []
    assert "to write it: --execute" in group.kmq("seek", "clicks/0", "--to", "3").stdout
    assert member.view().resources["clicks/0"].position == 7
    rows = group.kmq_json("seek", "clicks/0", "clicks/1", "--to", "3", "--execute")
    assert rows == [
        {"resource": "clicks/0", "old": 7, "new": 3, "is_written": True},
        {"resource": "clicks/1", "old": None, "new": 3, "is_written": True},
    ]
    assert group.kmq_json("seek", "clicks/1", "--forget", "--execute")[0]["old"] == 3
    group.kmq_json("pause", "--end")
    claim = member.claim("clicks/0", COMES_S)
    assert claim is not None
    assert claim.position == 3
    assert "clicks/1" not in member.view().resources


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        *(("seek", arguments) for arguments in (("r",), ("r", "--to", "3", "--forget"))),
        *(("pause", arguments) for arguments in ((), ("--for", "10m", "--end"))),
    ],
)
def test_command_without_one_target_is_a_usage_error(group: Group, verb: str, arguments: tuple[str, ...]) -> None:
    result = group.kmq(verb, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("kmq: ")


def test_init_creates_the_topic_once_and_commands_name_it_where_it_is_missing(bootstrap_servers: str) -> None:
    name = f"group-init-{time.time_ns()}"
    missing = kmq(bootstrap_servers, "group", "list", "--topic", name)
    assert missing.exit_code == 1
    assert f"coordination topic {name!r} does not exist; run `kmq group init`" in missing.stderr
    for _ in range(2):
        made = kmq(bootstrap_servers, "group", "init", "--topic", name, "--partitions", "3")
        assert (made.exit_code, made.stdout) == (0, f"coordination topic {name} is set up correctly\n")
    assert len(AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(name).topics[name].partitions) == 3
    empty = kmq(bootstrap_servers, "group", "list", "--topic", name)
    assert (empty.exit_code, empty.stdout, empty.stderr) == (0, "", f"no group has a record in {name}\n")


def test_foreign_records_and_names_do_not_disturb_the_list(group: Group, bootstrap_servers: str) -> None:
    """Bytes that are no record are counted; a key that is no name of a group is no group."""
    with_work(group)
    (state,) = read_groups(bootstrap_servers, topic=group.topic, group=group.name)
    client = Producer({"bootstrap.servers": bootstrap_servers})
    client.produce(group.topic, b"\xff\xff", group.name.encode(), partition=state.partition)
    client.produce(group.topic, b"x", b"\x1b[31m", partition=state.partition)
    assert client.flush(10) == 0
    found = group.kmq_json("describe")
    assert found["ignored"]["unreadable"] == 1
    assert found["state"] == "active"
    names = {each.group for each in read_groups(bootstrap_servers, topic=group.topic)}
    assert group.name in names
    assert not any("\x1b" in name for name in names)
