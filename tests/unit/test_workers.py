"""How the tests themselves are spread over processes: a process that dies takes one test with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
from tests import workers
from tests.conftest import *  # the hooks
from tests.conftest import _groups_file, _stderr

workers._LAST_RESORT_S = 2.0
"""

TESTS = """
import ctypes, os, time
import pytest

@pytest.fixture(scope="module")
def shared():
    pass

def ran(name):
    with open("ran", "a") as file:
        file.write(f"{name} {os.environ['PYTEST_XDIST_WORKER']}\\n")

def test_first(shared):
    ran("first")

def test_dies(shared):
    ran("dies")
    os._exit(1)

@pytest.mark.timeout(1)
def test_hangs(shared):
    ran("hangs")
    time.sleep(3_600)

@pytest.mark.timeout(1)
def test_hangs_in_c(shared):
    ran("hangs-in-c")
    ctypes.PyDLL(None).sleep(3_600)  # with Python's lock (the GIL) held: no thread of Python runs

@pytest.mark.parametrize("name", ["after", "and after"])
def test_after(shared, name):
    ran(name.replace(" ", "-"))

@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    ran(f"alone-{number}")

@pytest.mark.timeout(200)
def test_long():
    ran("long")
"""


def test_process_that_dies_fails_its_test_once_and_the_rest_of_its_group_goes_on(tmp_path: Path) -> None:
    """The group stays together before and after; of a test that hangs the process lives, unless it hangs in C."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 100\ntimeout_method = signal\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_group.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(os.getcwd()), environment.get("PYTHONPATH", "")])  # noqa: PTH109  # of this checkout
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-ra"],
        cwd=tmp_path, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert re.search(r"^=+ 3 failed, 7 passed in ", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert re.search(r"^FAILED test_group.py::test_dies", done.stdout, re.MULTILINE)
    assert re.search(r"^FAILED test_group.py::test_hangs\b", done.stdout, re.MULTILINE)
    assert re.search(r"^FAILED test_group.py::test_hangs_in_c", done.stdout, re.MULTILINE)
    lines = (tmp_path / "ran").read_text().splitlines()
    by_name = {line.split()[0]: line.split()[1] for line in lines}
    assert len(lines) == len(by_name) == 10  # none ran again
    assert by_name["first"] == by_name["dies"]
    assert by_name["hangs"] == by_name["after"] == by_name["and-after"] != by_name["dies"]
    order = list(by_name)
    assert order.index("long") < min(order.index(f"alone-{number}") for number in range(3))  # its limit is the longest
