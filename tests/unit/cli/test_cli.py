"""The `kmq` command: help everywhere, and what is wrong in one line with the right exit code."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kmq_spark
from kmq_spark.cli.main import app
from kmq_spark.config import load_settings

SECRET = "canary-7f3a"

COMMANDS = [
    (), ("queue",), ("queue", "create"), ("queue", "describe"), ("tracker",), ("tracker", "run"), ("up",), ("demo",),
    ("dlq",), ("dlq", "list"), ("dlq", "show"), ("dlq", "redrive"), ("dlq", "purge"),
    ("queue", "list"), ("queue", "peek"), ("send",), ("receive",), ("message",), ("message", "show"), ("doctor",),
    ("top",), ("tracker", "status"), ("acls",), ("group",), ("group", "init"), ("group", "list"),
    ("group", "describe"), ("group", "pause"), ("group", "seek"),
]  # fmt: skip


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
    assert result.exit_code == 0
    assert "Usage: kmq" in result.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_short_option_shows_the_same_help(command: tuple[str, ...]) -> None:
    assert kmq(*command, "-h").stdout == kmq(*command, "--help").stdout != ""


def test_help_keeps_what_stands_in_brackets() -> None:
    """Names of sections are in brackets, and so is rich's markup."""
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
        (["--nope"], "no such option: --nope; see `kmq --help`"),
        (["nope"], "no such command 'nope'; see `kmq --help`"),
        (["queue", "nope"], "no such command 'nope'; see `kmq queue --help`"),
        (["queue", "create"], "missing argument 'QUEUE'; see `kmq queue create --help`"),
        (["queue", "create", "q", "--nope"], "no such option: --nope; see `kmq queue create --help`"),
        (["queue", "create", "q", "--partitions", "x"], "invalid value for '--partitions'"),
        (["queue", "create", "q", "--partitions", "0"], "partitions is out of bounds: got 0, 1 to 32768"),
        (["queue", "create", "a b"], "queue name is not allowed: got 'a b'"),
        (["queue", "create", "q", "-X", "linger.ms"], "a client setting in -X has no key or no '='"),
        (["queue", "create", "q", "-X", "=5"], "a client setting in -X has no key or no '='"),
        (["queue", "create", "q", "-X", "lingr.ms=5"], "unknown Kafka client setting: got 'lingr.ms'"),
        (["queue", "create", "q", "-X", "acks=1"], "setting acks would break a guarantee: got '1', allowed 'all'"),
        (["queue", "create", "q", "-X", "plugin.library.paths=x"], "it loads a library into the process; remove it"),
        (
            ["queue", "describe", "q", "--command-config", "/nowhere"],
            "cannot read the client properties: got '/nowhere'",
        ),
        (["queue", "describe", "q", "--config", "/nowhere"], "cannot read the settings file: got '/nowhere'"),
        (["queue", "create", "q@"], "subscription is missing: got 'q@'"),
        (
            ["dlq", "show", "q", "7"],
            "id of a dead letter is not allowed: got '7'; expected partition:offset such as '0:17'",
        ),
        (
            ["dlq", "redrive", "q"],
            "choose dead letters: got nothing; expected one of ids, where and all",
        ),
        (["dlq", "redrive", "q", "--all", "--reason", "x"], "got where and all"),
        (["dlq", "redrive", "q", "--all", "--limit", "0"], "limit is not allowed: got 0; expected at least 1"),
        (["dlq", "redrive", "q", "--all", "--to", "a b"], "queue name is not allowed: got 'a b'"),
        (
            ["dlq", "redrive", "q", "--older-than", "soon"],
            "--older-than is not allowed: got 'soon'; expected 90s, 15m, 2h, 7d",
        ),
        (["dlq", "purge", "q", "--older-than", "2h", "--newer-than", "3d", "--all"], "got where and all"),
        (["dlq", "list", "q", "--older-than", "2d", "--newer-than", "2h"], "filter can match nothing: got dead_after"),
        (["dlq", "list", "q", "--limit", "0"], "limit is not allowed: got 0; expected at least 1"),
        (["dlq", "list", "q", "-o", "xml"], "invalid value for '-o'"),
        (["message", "show", "q", "7"], "message id is not allowed: got '7', partition:offset as in 0:42"),
        (["top", "q", "q"], "queue is given more than once: got 'q'"),
        (["top", "a b"], "queue name is not allowed: got 'a b'"),
        (["doctor", "q", "--timeout", "5ms"], "setting kafka.timeout is not allowed"),
        (["ledger", "run"], "name at least one queue: as an argument, or in [tracker] queues"),
        (["queue", "peek", "q", "-n", "0"], "invalid value for '-n'"),
        (["acls", "q", "--part", "other"], "part is not allowed: got 'other', one of producer, consumer"),
        (["queue", "list", "-X", "interceptor.classes=x.Y"], "setting interceptor.classes is not allowed: it loads"),
        (["tracker", "run", "a", "--metrics-port", "70000"], "setting metrics.port is not allowed: got 70000"),
        (["tracker", "run"], "name at least one queue: got none"),
        (["tracker", "run", "a b"], "setting tracker.queues.0 is not allowed: got 'a b'"),
        (["tracker", "run", "a", "--trigger", "once"], "input should be 'processing-time' or 'available-now'"),
        (["tracker", "run", "a", "--max-deliveries", "-1"], "setting queue.max_deliveries is not allowed: got -1"),
        (["tracker", "run", "a", "--log-level", "loud"], "log level is not allowed: got 'loud', one of DEBUG, INFO"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in one_line(kmq(*arguments), 2)


def test_client_properties_that_are_wrong_are_reported_without_their_text(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"# a comment\n\nsasl.username=me\n{SECRET}\n")
    line = one_line(kmq("queue", "describe", "q", "--command-config", str(file)), 2)
    assert f"a client setting in {file} has no key or no '='" in line
    assert SECRET not in line


def test_secret_on_the_command_line_is_warned_of() -> None:
    """`ps` shows it to everybody; the warning does not repeat it."""
    result = kmq("queue", "list", "-X", f"sasl.password={SECRET}", "-X", "acks=1")
    warning, error = result.stderr.splitlines()
    assert warning.startswith("kmq: warning: -X sasl.password=… is visible to every user in `ps`; put it into a file")
    assert "acks would break a guarantee" in error
    assert SECRET not in result.output


@pytest.mark.parametrize("key", ["ssl.keystore.key", "ssl.key.pem", "ssl.key.password", "sasl.jaas.config"])
def test_private_key_on_the_command_line_is_warned_of(key: str) -> None:
    """Settings with a private key need not have `password` or `secret` in their names."""
    result = kmq("queue", "list", "-X", f"{key}={SECRET}", "-X", "acks=1")
    assert f"warning: -X {key}=… is visible to every user" in result.stderr
    assert SECRET not in result.output


def test_fleet_that_would_end_by_itself_is_refused() -> None:
    """Before the broker or Spark is asked for anything."""
    line = one_line(kmq("tracker", "run", "orders", "--fleet", "f", "--trigger", "available-now"), 2)
    assert "trigger is not allowed in a fleet: got 'available-now'" in line
    assert "setting tracker.fleet is not allowed: got 'a b'" in one_line(kmq("tracker", "run", "--fleet", "a b"), 2)


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
    members = kmq("acls", "orders", "--part", "member", "--group", "g", "--coordination-topic", "c").stdout
    assert "--topic c\n" in members
    assert "--group kmq.coordination.g\n" in members
    assert "orders" not in members
    line = one_line(kmq("acls", "orders", "--fleet", "a b"), 2)
    assert "fleet name is not allowed: got 'a b'" in line


def test_acls_of_the_ledger_of_a_group_name_the_queue_s_own_group() -> None:
    """The messages of a queue are written once, whichever groups read it."""
    commands = kmq("acls", "orders@billing", "--part", "ledger").stdout
    assert "--topic orders.subscription-billing.markers" in commands
    assert "--group kmq.orders.ledger- --resource-pattern-type prefixed" in commands


def test_unknown_key_of_a_file_is_reported_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "kmq.toml"
    file.write_text("[tracker]\nqueue = ['orders']")
    line = one_line(kmq("tracker", "run", "--config", str(file)), 2)
    assert "unknown setting: got 'tracker.queue'" in line
    assert line.endswith("; did you mean 'queues'?")


def test_unknown_variable_of_the_environment_is_reported_with_a_suggestion() -> None:
    line = one_line(kmq("queue", "describe", "q", env={"KMQ_QUEU__LEASE_MS": "1"}), 2)
    assert line.endswith("; did you mean KMQ_QUEUE__…?")


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


def test_every_command_that_takes_settings_takes_all_options_of_a_connection() -> None:
    """One form everywhere; `acls`, `up` and `demo` need none."""
    for command in COMMANDS:
        options = set(re.findall(r"--?[a-zX][a-z-]*", kmq(*command, "--help", env={"COLUMNS": "200"}).stdout))
        if "--config" in options:
            assert options >= {"--bootstrap-server", "--command-config", "-X"}, command


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text("utf-8")
    headings = " ".join(line for line in page.splitlines() if line.startswith("## ")) + page.split("## The others")[1]
    for command in COMMANDS:
        if command:
            assert command[0] in headings, command
            assert command[-1] in headings, command


def test_folders_that_the_commands_make_are_ignored_by_git() -> None:
    """And none of our own: a pattern without a slash would hide kmq_spark/ledger."""
    patterns = (Path(__file__).parents[3] / ".gitignore").read_text("utf-8").splitlines()
    assert {f"/{load_settings().tracker.checkpoint_dir}/", f"/{load_settings().ledger.dir}/"} <= set(patterns)
    assert "ledger/" not in patterns
