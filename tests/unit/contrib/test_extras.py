"""What a program is told that lacks the package of an extra."""

from __future__ import annotations

import subprocess
import sys


def test_module_without_its_package_names_its_extra() -> None:
    program = "import sys; sys.modules['dramatiq'] = None; import kmq_spark.contrib.dramatiq"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "kmq_spark.errors.SetupError: cannot use the dramatiq broker: module 'dramatiq' is not installed; "
        "run `pip install 'kmq-spark[dramatiq]'`"
    )
