"""The `kmq` command: help everywhere, options anywhere, and what is wrong in one line with the right exit code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner, Result

import kmq_spark
from kmq_spark.cli.main import app
from kmq_spark.config import load_settings

SECRET = "canary-7f3a"


def commands_of(command: object, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command, groups included."""
    found = [words]
    for name, each in getattr(command, "commands", {}).items():
        found += commands_of(each, (*words, name))
    return found


COMMANDS = commands_of(typer.main.get_command(app))


def kmq(*arguments: str, env: dict[str, str] | None = None) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, arguments, env=env, prog_name="kmq")


def one_line(result: Result, exit_code: int) -> str:
    """Return the one line with which a command failed."""
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("kmq: ")
    return line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    result = kmq(*command, "--help")
    assert (result.exit_code, result.stdout) == (0, kmq(*command, "-h").stdout)
    assert "Usage: kmq" in result.stdout


def test_help_keeps_what_stands_in_brackets() -> None:
    help_text = " ".join(kmq("tracker", "run", "--help", env={"COLUMNS": "200"}).stdout.split())
    assert "default: [tracker] queues." in help_text
    assert "[default: local[2]]" in help_text


def test_version_is_that_of_the_package() -> None:
    assert kmq("--version").stdout == f"kmq {kmq_spark.__version__}\n"


def test_no_arguments_is_help_and_a_usage_error() -> None:
    """As Kafka's own tools have it: nothing to do is no success."""
    result = kmq()
    assert result.exit_code == 2
    assert "Usage: kmq" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], "No such option: --nope"),
        (["queue", "nope"], "No such command 'nope'"),
        (["queue", "create"], "Missing argument 'QUEUE'"),
        (["queue", "create", "q", "--partitions", "x"], "Invalid value for '--partitions'"),
        (["dlq", "list", "q", "-o", "xml"], "Invalid value for '-o'"),
        (["tracker", "run", "a", "--log-level", "loud"], "Invalid value for '--log-level'"),
    ],
)
def test_wrong_usage_names_what_is_wrong_with_exit_code_2(arguments: list[str], message: str) -> None:
    result = kmq(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["queue", "create", "q", "--partitions", "0"], "partitions is out of bounds: got 0; expected 1 to 32768"),
        (["queue", "create", "a b"], "queue name is not allowed: got 'a b'"),
        (["queue", "create", "q", "-X", "linger.ms"], "a client setting in -X has no key or no '='"),
        (["queue", "create", "q", "-X", "=5"], "a client setting in -X has no key or no '='"),
        (["queue", "create", "q", "-X", "lingr.ms=5"], "unknown Kafka client setting: got 'lingr.ms'"),
        (["queue", "create", "q", "-X", "acks=1"], "setting acks would break a guarantee: got '1'; expected 'all'"),
        (["queue", "create", "q", "-Xplugin.library.paths=x"], "it loads a library into the process; remove it"),
        (["queue", "describe", "q", "--command-config=/nowhere"], "cannot read the client properties: got '/nowhere'"),
        (["queue", "describe", "q", "--config", "/nowhere"], "cannot read the settings file: got '/nowhere'"),
        (["--config", "/nowhere", "queue", "describe", "q"], "cannot read the settings file: got '/nowhere'"),
        (
            ["dlq", "list", "q", "--id", "7"],
            "id of a dead letter is not allowed: got '7'; expected partition:offset such as",
        ),
        (["dlq", "redrive", "q", "--all", "--limit", "0"], "limit is not allowed: got 0; expected at least 1"),
        (["dlq", "redrive", "q", "--older-than", "soon"], "--older-than is not allowed: got 'soon'; expected 90s, 15m"),
        (["dlq", "list", "q", "--older-than", "2d", "--newer-than", "2h"], "filter can match nothing: got dead_after"),
        (["message", "show", "q", "7"], "message id is not allowed: got '7'; expected partition:offset as in 0:42"),
        (["message", "show", "q"], "message show takes one message: got neither; give P:O as in 0:42, or --key"),
        (["message", "show", "q", "0:1", "--key", "k"], "message show takes one message: got both; give P:O as in"),
        (["receive", "q", "--wait", "soon"], "--wait is not a duration: got 'soon'; expected 30s, 5m, 2h or a number"),
        (["top", "q", "q"], "queue is given more than once: got 'q'"),
        (["top", "a b"], "queue name is not allowed: got 'a b'"),
        (["acls", "q", "--part", "other"], "part is not allowed: got 'other'; expected one of producer, consumer"),
        (["queue", "list", "-X", "interceptor.classes=x.Y"], "setting interceptor.classes is not allowed: it loads"),
        (["tracker", "run", "a", "--metrics-port", "70000"], "setting metrics.port is not allowed: got 70000"),
        (["tracker", "run"], "name at least one queue: got none"),
        (["tracker", "run", "a b"], "setting tracker.queues.0 is not allowed: got 'a b'"),
        (["tracker", "run", "--fleet", "a b"], "setting tracker.fleet is not allowed: got 'a b'"),
        (["ledger", "run"], "name at least one queue: as an argument, or in [tracker] queues"),
        (["ledger", "show", "totals", "--message", "0:1"], "--message needs message_story and --queue"),
    ],
)
def test_wrong_value_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in one_line(kmq(*arguments), 2)


def test_client_properties_that_are_wrong_are_reported_without_their_text(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"# a comment\n\nsasl.username=me\n{SECRET}\n")
    line = one_line(kmq("queue", "describe", "q", "--command-config", str(file)), 2)
    assert f"a client setting in {file} has no key or no '='" in line
    assert SECRET not in line


@pytest.mark.parametrize("key", ["sasl.password", "ssl.keystore.key", "ssl.key.pem", "sasl.jaas.config"])
def test_secret_on_the_command_line_is_warned_of(key: str) -> None:
    """`ps` shows it to everybody; the warning does not repeat it."""
    result = kmq("queue", "list", "-X", f"{key}={SECRET}", "-X", "acks=1")
    assert f"kmq: warning: -X {key}=… is visible to every user in `ps`; put it into a file" in result.stderr
    assert SECRET not in result.output


def test_acls_are_commands_that_name_the_queue_s_own_resources() -> None:
    commands = kmq("acls", "orders@billing", "--part", "tracker").stdout.splitlines()
    assert commands[0] == "# tracker"
    assert all("--allow-principal User:kmq-tracker " in command for command in commands[1:])
    assert any("--topic orders.subscription-billing.markers" in command for command in commands)
    assert any("--transactional-id kmq.orders.subscription-billing.tracker" in command for command in commands)


def test_acls_of_a_fleet_and_a_group_name_the_coordination_topic() -> None:
    """In addition to those of a tracker that is alone; a group's members get no right on the queue."""
    alone = kmq("acls", "orders", "--part", "tracker").stdout.splitlines()
    fleet = kmq("acls", "orders", "--part", "tracker", "--fleet", "production").stdout.splitlines()
    assert fleet[: len(alone)] == alone
    topic, group = fleet[len(alone) :]
    assert "--operation Read --operation Write --operation Describe --operation DescribeConfigs" in topic
    assert topic.endswith("--topic kmq.coordination")
    assert group.endswith("--group kmq.coordination.kmq.fleet.production")
    members = kmq("acls", "orders", "--part", "member", "--group", "g", env={"KMQ_TRACKER__COORDINATION_TOPIC": "c"})
    assert "--topic c\n" in members.stdout
    assert "--group kmq.coordination.g\n" in members.stdout
    assert "orders" not in members.stdout
    assert "fleet name is not allowed: got 'a b'" in one_line(kmq("acls", "orders", "--fleet", "a b"), 2)


def test_acls_of_the_ledger_of_a_subscription_name_the_queue_s_own_group() -> None:
    """The messages of a queue are written once, whichever subscriptions read it."""
    commands = kmq("acls", "orders@billing", "--part", "ledger").stdout
    assert "--topic orders.subscription-billing.markers" in commands
    assert "--group kmq.orders.ledger- --resource-pattern-type prefixed" in commands


def test_unknown_setting_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "kmq.toml"
    file.write_text("[tracker]\nqueue = ['orders']")
    line = one_line(kmq("tracker", "run", "--config", str(file)), 2)
    assert "unknown setting: got 'tracker.queue'" in line
    assert line.endswith("; did you mean 'queues'?")
    line = one_line(kmq("queue", "describe", "q", env={"KMQ_TRACKR__QUEUES": "1"}), 2)
    assert line.endswith("; did you mean KMQ_TRACKER__…?")


@pytest.mark.parametrize(
    "command", [("queue", "create"), ("queue", "describe"), ("tracker", "run"), ("dlq", "list")], ids=" ".join
)
def test_unreachable_broker_is_one_line_within_the_time_out(command: tuple[str, ...]) -> None:
    """The tracker fails before it starts a JVM."""
    began_at = time.monotonic()
    arguments = [*command, "orders", "--bootstrap-server", "127.0.0.1:1"]
    secret = {"KMQ_KAFKA__EXTRA": f'{{"sasl.password": "{SECRET}"}}'}
    line = one_line(kmq(*arguments, env={"KMQ_KAFKA__TIMEOUT": "1", **secret}), 1)
    # On a slow machine too; the default is 15 s.
    assert time.monotonic() - began_at < 12
    assert "cannot reach broker at 127.0.0.1:1: " in line
    assert "; check that the broker runs, and [kafka] bootstrap_servers" in line
    assert SECRET not in line


def test_folders_that_the_commands_make_are_ignored_by_git() -> None:
    """And none of our own: a pattern without a slash would hide kmq_spark/ledger."""
    patterns = (Path(__file__).parents[3] / ".gitignore").read_text("utf-8").splitlines()
    assert {f"/{load_settings().tracker.checkpoint_dir}/", f"/{load_settings().ledger.dir}/"} <= set(patterns)
    assert "ledger/" not in patterns
