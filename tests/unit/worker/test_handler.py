"""The handler that a command line names: what is wrong with it is one line, and nothing is received before it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kmq_spark.cli.main import app
from kmq_spark.errors import ConfigError
from kmq_spark.worker.handler import load_handler
from tests.limits import ENDS_S

MODULE = """
from functools import partial

limit = 5
def handle(message): return message
async def wait(message): return message
def generate(message): yield message
def lonely(): pass
class Shop:
    def __call__(self, message): return message
    def close(self, message): return message
shop = Shop()
half = partial(lambda rate, message: message, 2)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with modules, from which the command is run."""
    for name, text in {
        "shop": MODULE,
        "broken": "1 / 0",
        "needy": "import no_such_package",
        "script": "exit(0)",
    }.items():
        (tmp_path / f"{name}_of_test.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["handle", "wait", "shop", "shop.close", "half"])
def test_what_can_be_called_with_a_message_is_a_handler(name: str) -> None:
    assert callable(load_handler(f"shop_of_test:{name}"))


WRONG = [
    ("shop_of_test", "expected module:handler"),
    ("shop_of_test:", "expected module:handler"),
    ("nowhere.at.all:handle", "there is no module 'nowhere'"),
    ("needy_of_test:handle", r"No module named 'no_such_package' \(.*needy_of_test.py:1\)"),
    ("broken_of_test:handle", r"ZeroDivisionError: division by zero \(.*broken_of_test.py:1\)"),
    ("script_of_test:handle", "SystemExit: 0"),
    ("shop_of_test:handel", "did you mean 'handle'?"),
    ("shop_of_test:limit", "handler is not callable: got 5"),
    ("shop_of_test:generate", "handler is a generator function"),
    ("shop_of_test:lonely", "handler does not take one message"),
    ("shop_of_test:Shop", "handler is a class"),
]


@pytest.mark.parametrize(("path", "what"), WRONG)
def test_wrong_handler_is_named_with_its_repair(path: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what) if "\\" not in what else what):
        load_handler(path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["shop_of_test:handel"], "did you mean 'handle'?"),
        (["shop_of_test:handle", "--processes", "0"], "setting worker.processes is not allowed: got 0"),
        (["shop_of_test:handle", "--concurrency", "0"], "setting worker.concurrency is not allowed: got 0"),
        (["shop_of_test:handle", "--batch", "0"], "setting worker.batch is not allowed: got 0"),
        (["shop_of_test:handle", "--concurrency", "4", "--processes", "2"], "exclude each other: got 4 and 2"),
        (["shop_of_test:handel", "--processes", "2"], "did you mean 'handle'?"),
    ],
)
def test_bad_configuration_ends_the_command_with_2_before_any_connection(options: list[str], what: str) -> None:
    """No broker listens at the address."""
    result = CliRunner().invoke(
        app, ["worker", *options[:1], "orders", *options[1:], "--bootstrap-server", "localhost:1"]
    )
    assert result.exit_code == 2
    assert what in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("options", [[], ["--processes", "2"]], ids=["threads", "processes"])
def test_sigterm_while_the_handler_is_imported_is_a_clean_stop_at_once(tmp_path: Path, options: list[str]) -> None:
    """No broker listens at the address, so nothing but the stop can end the command with 0."""
    (tmp_path / "slow_of_test.py").write_text(
        "import pathlib, time\npathlib.Path('imported').touch()\ntime.sleep(3600)\ndef handle(message): pass\n"
    )
    words = ["worker", "slow_of_test:handle", "orders", *options, "--bootstrap-server", "localhost:1"]
    worker = subprocess.Popen([sys.executable, "-m", "kmq_spark.cli.main", *words], cwd=tmp_path)
    try:
        while not (tmp_path / "imported").exists():
            assert worker.poll() is None
            time.sleep(0.05)
        worker.terminate()
        assert worker.wait(ENDS_S) == 0
    finally:
        worker.kill()
