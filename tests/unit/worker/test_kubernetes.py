"""The Deployment of docs/worker.md: its command is one, its settings exist, and its times fit together."""

from __future__ import annotations

from pathlib import Path

import yaml
from typer.testing import CliRunner

from kmq_spark.cli.main import app
from kmq_spark.config import load_settings

PAGE = Path(__file__).parents[3] / "docs" / "worker.md"


def test_deployment_is_accepted_by_the_command_and_its_settings() -> None:
    """Without the module of the handler the command gets as far as its import."""
    pod = yaml.safe_load(PAGE.read_text("utf-8").partition("```yaml\n")[2].partition("```")[0])["spec"]["template"][
        "spec"
    ]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    result = CliRunner().invoke(app, container["command"][1:], env=environment)
    assert result.exit_code == 2
    assert "there is no module 'shop'" in result.stderr
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    options = container["command"]
    assert [options[options.index(f"--{name}-port") + 1] for name in ports] == list(ports.values())
    assert pod["terminationGracePeriodSeconds"] >= load_settings().worker.drain_timeout + 10
