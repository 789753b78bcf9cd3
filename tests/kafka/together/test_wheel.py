"""What `pip install` brings is enough: everything runs from the wheel, outside the repository."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import quick_java
from tests.kafka.commands import no_process_outlives_its_test, start  # noqa: F401  # a fixture
from tests.kafka.conftest import wait_until
from tests.limits import ENDS_S

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[3]

HANDLER = """
import os, signal, kmq_spark
def handle(message):
    if message.delivery_count == 1: os.kill(os.getpid(), signal.SIGKILL)
    print(message.value, kmq_spark.__file__, flush=True)
"""

SEND = """
import sys
from kmq_spark import QueueProducer
with QueueProducer("orders", bootstrap_servers=sys.argv[1]) as producer:
    producer.send("a")
"""


def code_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process."""
    process.communicate(timeout=ENDS_S)
    return process.returncode


def test_message_is_redelivered_by_what_the_wheel_contains(tmp_path: Path) -> None:
    """The packages that it needs are those of the tests, and so are the jars."""
    site, app = tmp_path / "site", tmp_path / "app"
    app.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *tmp_path.glob("*.whl")], check=True)
    (app / "shop.py").write_text(HANDLER)
    environment = {**os.environ, "PYTHONPATH": str(site), "KMQ_WORKER__LEASE": "1"}
    outside: dict[str, Any] = {"cwd": app, "env": environment}
    up = subprocess.Popen(
        [sys.executable, "-m", "kmq_spark.cli.main", "up"], stdout=subprocess.PIPE, text=True, cwd=app,
        env={**environment, **quick_java()},
    )  # fmt: skip
    assert up.stdout is not None
    try:
        broker = up.stdout.readline().split("--bootstrap-server ")[1].split()[0]
        assert code_of(start(broker, "queue", "create", "orders", **outside)) == 0
        subprocess.run([sys.executable, "-c", SEND, broker], check=True, **outside)
        assert code_of(start(broker, "worker", "shop:handle", "orders", **outside)) == -signal.SIGKILL
        with (app / "log").open("wb") as log, (app / "output").open("wb") as output:
            start(broker, "tracker", "run", "orders", **outside, stdout=log, stderr=log)
            start(broker, "worker", "shop:handle", "orders", **outside, stdout=output, stderr=log)
        done = f"b'a' {site / 'kmq_spark' / '__init__.py'}\n"
        assert wait_until(lambda: (app / "output").read_text() == done), (app / "log").read_text()
    finally:
        up.terminate()
        up.communicate(timeout=ENDS_S)
