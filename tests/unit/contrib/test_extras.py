"""The error of a module whose package is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "task"), [("dramatiq", "use the dramatiq broker"), ("opentelemetry", "trace messages")]
)
def test_module_without_its_package_names_its_extra(module: str, task: str) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; import kmq_spark.contrib.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"kmq_spark.errors.SetupError: cannot {task}: module {module!r} is not installed; "
        f"run `pip install 'kmq-spark[{module}]'`"
    )
