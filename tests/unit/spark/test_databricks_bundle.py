"""`databricks.yml` without an account: everything that it names exists here, and every setting in it is taken."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import kmq_spark.cli.ledger
import kmq_spark.cli.tracker
import kmq_spark.cli.tracker_once
from kmq_spark.cli.shared.options import Address, settings_from
from kmq_spark.config import load_settings, plain
from kmq_spark.spark.session import local_checkpoint_settings

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "databricks.yml").read_text(encoding="utf-8")
BUNDLE: dict[str, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = BUNDLE["resources"]["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRACKER, LEDGER = "kmq_tracker", "kmq_ledger"
FLEET = ("kmq_fleet_a", "kmq_fleet_b")
CONTINUOUS = (TRACKER, *FLEET)
SERVERLESS = "kmq_tracker_once"
ON_CLUSTERS = [job for job in JOBS if job != SERVERLESS]

SECTION_OF = {"kmq_tracker": "tracker", **dict.fromkeys(FLEET, "tracker")}
COMMAND_OF: dict[str, Callable[..., None]] = {
    "kmq_tracker": kmq_spark.cli.tracker.run,
    **dict.fromkeys(FLEET, kmq_spark.cli.tracker.run),
    "kmq_tracker_once": kmq_spark.cli.tracker_once.once,
    "kmq_ledger": kmq_spark.cli.ledger.run,
}

OPTION_OF_FLAG = {
    "--checkpoint-dir": "checkpoint_dir", "--trigger": "trigger", "--fleet": "fleet", "--fleet-member": "fleet_member",
}  # fmt: skip


def resolved(text: str) -> str:
    """Return a text with its variables replaced, as `databricks bundle validate` does it."""

    def value(found: re.Match[str]) -> str:
        if found[1] == "workspace.file_path":
            return str(ROOT)
        return str(BUNDLE["variables"][found[1].removeprefix("var.")]["default"])

    return re.sub(r"\$\{([^}]+)\}", value, text)


def task_of(job: str) -> dict[str, Any]:
    """Return the one task of a job."""
    (task,) = JOBS[job]["tasks"]
    return dict(task)


def flags_of(job: str) -> dict[str, str]:
    """Return the parameters of a job's task: every one is a flag with a value."""
    parameters = [resolved(text) for text in task_of(job)["python_wheel_task"]["parameters"]]
    if job == LEDGER:
        assert parameters.pop() == "--once"
    return dict(zip(parameters[::2], parameters[1::2], strict=True))


def cluster_of(job: str) -> dict[str, Any]:
    """Return the cluster that a job's task names."""
    clusters = {each["job_cluster_key"]: each["new_cluster"] for each in JOBS[job]["job_clusters"]}
    return dict(clusters[task_of(job)["job_cluster_key"]])


def test_only_sections_that_bundles_know() -> None:
    assert set(BUNDLE) == {"bundle", "artifacts", "sync", "variables", "resources", "targets"}
    used = {name.removeprefix("var.") for name in re.findall(r"\$\{(var\.[a-z_]+)\}", TEXT)}
    assert used == set(BUNDLE["variables"])


@pytest.mark.parametrize("job", JOBS)
def test_entry_point_of_each_job_is_one_of_the_wheel(job: str) -> None:
    wheel_task = task_of(job)["python_wheel_task"]
    assert wheel_task["package_name"] == PROJECT["name"]
    module, _, function = PROJECT["scripts"][wheel_task["entry_point"]].partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("job", SECTION_OF)
def test_settings_of_each_job_are_taken(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags, the file and the secrets, together."""
    flags = flags_of(job)
    for name in cluster_of(job)["spark_env_vars"]:
        monkeypatch.setenv(name, json.dumps({"sasl.password": name}))
    values = {OPTION_OF_FLAG[flag]: value for flag, value in flags.items() if flag != "--config"}
    settings = load_settings(Path(flags["--config"]), {SECTION_OF[job]: values})
    assert plain(settings.kafka.extra)["sasl.password"] == "KMQ_KAFKA__EXTRA"
    assert plain(settings.kafka.spark_extra)["sasl.password"] == "KMQ_KAFKA__SPARK_EXTRA"
    assert plain(settings.kafka.extra)["security.protocol"] == "SASL_SSL"  # of the file
    got = getattr(settings, SECTION_OF[job])
    assert got.checkpoint_dir == values["checkpoint_dir"]
    assert got.trigger == ("processing-time" if job in CONTINUOUS else "available-now")


def test_ledger_job_has_its_place_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster_of(LEDGER)["spark_env_vars"].items():
        monkeypatch.setenv(name, resolved(value) if name.startswith("KMQ_LEDGER") else "{}")
    ledger = load_settings(Path(flags_of(LEDGER)["--config"])).ledger
    assert ledger.catalog == "main.kmq"
    assert local_checkpoint_settings(ledger.checkpoint_dir) == {}


def test_serverless_job_has_its_secrets_from_a_file_in_a_volume(tmp_path: Path) -> None:
    """It has no environment variables of ours, and no Spark."""
    flags = flags_of(SERVERLESS)
    assert flags["--command-config"].startswith("/Volumes/")
    (file := tmp_path / "client.properties").write_text("sasl.username=kmq\nsasl.password=canary\n")
    settings = settings_from(Address(config=Path(flags["--config"]), command_config=file))
    assert plain(settings.kafka.extra)["sasl.password"] == "canary"
    assert "job_clusters" not in JOBS[SERVERLESS]
    (environment,) = JOBS[SERVERLESS]["environments"]
    assert environment["environment_key"] == task_of(SERVERLESS)["environment_key"]
    wheel, *packages = environment["spec"]["dependencies"]
    assert wheel == "./dist/*.whl"
    assert sorted(packages) == sorted(PROJECT["optional-dependencies"]["cli"])


@pytest.mark.parametrize("job", JOBS)
def test_flags_of_each_job_are_those_of_its_command(job: str) -> None:
    taken = set(inspect.signature(COMMAND_OF[job]).parameters)
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags_of(job)}
    assert names <= taken


@pytest.mark.parametrize("job", JOBS)
def test_one_run_of_a_job_at_a_time_and_only_trackers_run_on(job: str) -> None:
    """A second one fences the first."""
    assert JOBS[job]["max_concurrent_runs"] == 1
    assert ("continuous" in JOBS[job]) == (job in CONTINUOUS)
    assert ("schedule" in JOBS[job]) == (job not in CONTINUOUS)


def test_jobs_of_a_fleet_differ_in_name_and_checkpoint_and_run_only_on_request() -> None:
    """Two members of one name refuse each other, and `kmq_tracker` would fence both."""
    first, second = (flags_of(job) for job in FLEET)
    assert first["--fleet"] == second["--fleet"]
    assert first["--fleet-member"] != second["--fleet-member"]
    assert first["--checkpoint-dir"] != second["--checkpoint-dir"]
    for job in FLEET:
        assert JOBS[job]["continuous"]["pause_status"] == "PAUSED"


def test_the_two_forms_of_the_tracker_do_not_run_by_themselves_together() -> None:
    """They would fence each other in turns."""
    assert JOBS[TRACKER]["continuous"]["pause_status"] == "UNPAUSED"
    assert JOBS[SERVERLESS]["schedule"]["pause_status"] == "PAUSED"


@pytest.mark.parametrize("job", [job for job in ON_CLUSTERS if job != LEDGER])
def test_checkpoint_lies_in_a_volume_and_keeps_the_platforms_own_file_manager(job: str) -> None:
    checkpoint = flags_of(job)["--checkpoint-dir"]
    assert checkpoint.startswith("/Volumes/")
    assert local_checkpoint_settings(checkpoint) == {}
    assert local_checkpoint_settings("/var/kmq/checkpoints") != {}


def test_secrets_are_named_and_nowhere_written() -> None:
    for job in ON_CLUSTERS:
        for value in (cluster_of(job)["spark_env_vars"][f"KMQ_KAFKA__{name}"] for name in ("EXTRA", "SPARK_EXTRA")):
            assert re.fullmatch(r"\{\{secrets/\$\{var\.secret_scope\}/[a-z-]+\}\}", value)
    for word in ("password=", "token=", "sasl.jaas", "https://"):
        assert word not in TEXT


@pytest.mark.parametrize("job", ON_CLUSTERS)
def test_cluster_has_what_the_package_needs_and_no_spark_of_our_own(job: str) -> None:
    """The wheel, and the extra `cli` as pyproject.toml has it."""
    wheel, *packages = task_of(job)["libraries"]
    assert wheel == {"whl": "./dist/*.whl"}
    assert "--wheel-dir dist" in BUNDLE["artifacts"]["kmq_spark"]["build"]
    assert sorted(each["pypi"]["package"] for each in packages) == sorted(PROJECT["optional-dependencies"]["cli"])
    assert cluster_of(job)["data_security_mode"] == "SINGLE_USER"


@pytest.mark.parametrize("entry_point", ["kmq-tracker", "kmq-tracker-once", "kmq-ledger"])
def test_task_that_ends_well_returns_and_one_that_fails_raises(
    entry_point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform takes every SystemExit for a failure."""
    module, _, function = PROJECT["scripts"][entry_point].partition(":")
    task = getattr(import_module(module), function)
    monkeypatch.setattr("sys.argv", [entry_point, "--help"])
    task()
    monkeypatch.setattr("sys.argv", [entry_point, "--no-such-flag"])
    with pytest.raises(SystemExit) as ended:
        task()
    assert ended.value.code == 2
