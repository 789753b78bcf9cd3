"""
databricks.yml: its jobs name what the wheel has, and their parameters and environment are taken.

The platform itself is not asked: nothing here needs a workspace.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from kmq_spark.cli.main import app, task
from kmq_spark.config import load_settings, plain
from kmq_spark.spark.session import local_checkpoint_settings

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "databricks.yml").read_text(encoding="utf-8")
BUNDLE: dict[str, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = BUNDLE["resources"]["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TRACKER, LEDGER, SERVERLESS = "kmq_tracker", "kmq_ledger", "kmq_tracker_once"
FLEET = ("kmq_fleet_a", "kmq_fleet_b")
ON_CLUSTERS = [job for job in JOBS if job != SERVERLESS]


def resolved(text: str) -> str:
    """Return a text with its variables replaced, as `databricks bundle validate` does it."""

    def value(found: re.Match[str]) -> str:
        if found[1] == "workspace.file_path":
            return str(ROOT)
        return str(BUNDLE["variables"][found[1].removeprefix("var.")]["default"])

    return re.sub(r"\$\{([^}]+)\}", value, text)


def task_of(job: str) -> dict[str, Any]:
    """Return the one task of a job."""
    (found,) = JOBS[job]["tasks"]
    return dict(found)


def cluster_of(job: str) -> dict[str, Any]:
    """Return the cluster that a job's task names."""
    clusters = {each["job_cluster_key"]: each["new_cluster"] for each in JOBS[job]["job_clusters"]}
    return dict(clusters[task_of(job)["job_cluster_key"]])


def options_of(job: str) -> dict[str, Any]:
    """Parse the parameters of a job's task as `kmq` does; return the options of the line and of the command."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("kmq", list(map(resolved, task_of(job)["python_wheel_task"]["parameters"])))
    found: dict[str, Any] = {}
    while True:
        found |= context.params
        if not (rest := [*context._protected_args, *context.args]):
            return found
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_every_variable_is_used() -> None:
    used = {name.removeprefix("var.") for name in re.findall(r"\$\{(var\.[a-z_]+)\}", TEXT)}
    assert used == set(BUNDLE["variables"])


@pytest.mark.parametrize("job", JOBS)
def test_task_of_each_job_is_a_command_of_the_wheel(job: str) -> None:
    wheel_task = task_of(job)["python_wheel_task"]
    assert wheel_task["package_name"] == PROJECT["name"]
    module, _, function = PROJECT["scripts"][wheel_task["entry_point"]].partition(":")
    assert getattr(import_module(module), function) is task
    assert options_of(job)["config"] == ROOT / "conf" / "cluster.toml"


@pytest.mark.parametrize("job", ON_CLUSTERS)
def test_settings_of_each_job_are_taken(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, the file, the environment and the secrets, together; checkpoints lie in a Volume."""
    for name, value in cluster_of(job)["spark_env_vars"].items():
        secret = re.fullmatch(r"\{\{secrets/\$\{var\.secret_scope\}/[a-z-]+\}\}", value)
        monkeypatch.setenv(name, json.dumps({"sasl.password": name}) if secret else resolved(value))
    options = options_of(job)
    settings = load_settings(options["config"])
    assert plain(settings.kafka.extra)["sasl.password"] == "KMQ_KAFKA__EXTRA"
    assert plain(settings.kafka.spark_extra)["sasl.password"] == "KMQ_KAFKA__SPARK_EXTRA"
    assert plain(settings.kafka.extra)["security.protocol"] == "SASL_SSL"  # of the file
    checkpoint = settings.ledger.checkpoint_dir if job == LEDGER else options["checkpoint_dir"]
    assert checkpoint.startswith("/Volumes/")
    assert local_checkpoint_settings(checkpoint) == {}
    assert job != LEDGER or (settings.ledger.catalog, options["once"]) == ("main.kmq", True)


def test_serverless_job_has_its_secrets_from_a_file_in_a_volume() -> None:
    """It has no environment variables of ours, and no Spark."""
    assert str(options_of(SERVERLESS)["command_config"]).startswith("/Volumes/")
    assert "job_clusters" not in JOBS[SERVERLESS]
    (environment,) = JOBS[SERVERLESS]["environments"]
    assert environment["environment_key"] == task_of(SERVERLESS)["environment_key"]
    wheel, *packages = environment["spec"]["dependencies"]
    assert wheel == "./dist/*.whl"
    assert sorted(packages) == sorted(PROJECT["optional-dependencies"]["cli"])


def test_trackers_do_not_run_by_themselves_together() -> None:
    """A second run of a job, the fleet and the one without Spark would fence the tracker."""
    assert all(job["max_concurrent_runs"] == 1 for job in JOBS.values())
    assert JOBS[TRACKER]["continuous"]["pause_status"] == "UNPAUSED"
    assert {JOBS[job]["continuous"]["pause_status"] for job in FLEET} == {"PAUSED"}
    assert JOBS[SERVERLESS]["schedule"]["pause_status"] == "PAUSED"
    first, second = (options_of(job) for job in FLEET)
    assert first["fleet"] == second["fleet"]
    assert first["fleet_member"] != second["fleet_member"]
    assert first["checkpoint_dir"] != second["checkpoint_dir"]


@pytest.mark.parametrize("job", ON_CLUSTERS)
def test_cluster_has_what_the_package_needs_and_no_spark_of_our_own(job: str) -> None:
    """The wheel, and the extra `cli` as pyproject.toml has it."""
    wheel, *packages = task_of(job)["libraries"]
    assert wheel == {"whl": "./dist/*.whl"}
    assert "--wheel-dir dist" in BUNDLE["artifacts"]["kmq_spark"]["build"]
    assert sorted(each["pypi"]["package"] for each in packages) == sorted(PROJECT["optional-dependencies"]["cli"])
    assert cluster_of(job)["data_security_mode"] == "SINGLE_USER"


def test_production_has_one_copy_in_a_folder_of_its_own() -> None:
    """`databricks bundle deploy` refuses production mode without `root_path`."""
    target = BUNDLE["targets"]["prod"]
    assert target["mode"] == "production"
    assert target["workspace"]["root_path"].startswith("/Workspace/Users/${workspace.current_user.userName}/")


def test_no_secret_is_written() -> None:
    for word in ("password=", "token=", "sasl.jaas", "https://"):
        assert word not in TEXT


def test_task_that_ends_well_returns_and_one_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform takes every SystemExit for a failure."""
    monkeypatch.setattr("sys.argv", ["kmq-task", "tracker", "run", "--help"])
    task()
    monkeypatch.setattr("sys.argv", ["kmq-task", "tracker", "run", "--no-such-flag"])
    with pytest.raises(SystemExit) as ended:
        task()
    assert ended.value.code == 2
