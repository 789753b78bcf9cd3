"""The error of a module whose package is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra", "task"),
    [
        ("dramatiq", "dramatiq", "dramatiq", "use the dramatiq broker"),
        ("opentelemetry", "opentelemetry", "opentelemetry", "trace messages"),
        ("prometheus", "prometheus_client", "metrics", "measure handlers"),
    ],
)
def test_module_without_its_package_names_its_extra(module: str, package: str, extra: str, task: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import kmq_spark.contrib.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"kmq_spark.errors.SetupError: cannot {task}: module {package!r} is not installed; "
        f"run `pip install 'kmq-spark[{extra}]'`"
    )


def test_tracker_needs_no_opentelemetry() -> None:
    program = "import sys; sys.modules['opentelemetry'] = None; import kmq_spark.tracker.sender.redelivery"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
