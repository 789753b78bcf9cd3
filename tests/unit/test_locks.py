"""The lock files: they are installed without resolving, so nothing else notices a package that is missing there."""

from __future__ import annotations

import subprocess
import sys


def test_each_installed_package_has_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
