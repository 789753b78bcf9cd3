"""The embedded broker: a real one, on the loopback, that never outlives its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.probe import is_ready
from tests.brokers import quick_broker, quick_java
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.kafka

QUIET: dict[str, str | int | float | bool] = {"log_level": 0}
"""A broker that is away on purpose makes the client print a line every 50 ms otherwise."""


def _create_topic(servers: str, topic: str) -> None:
    """Create a topic of one partition."""
    admin = AdminClient(QUIET | {"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)


def _read_one(servers: str, topic: str) -> bytes | None:
    """Return the first committed value of a topic."""
    settings = {"group.id": f"read-{topic}", "auto.offset.reset": "earliest", "isolation.level": "read_committed"}
    consumer = Consumer(QUIET | settings | {"bootstrap.servers": servers})
    consumer.subscribe([topic])
    try:
        message = consumer.poll(20)
        return None if message is None else message.value()
    finally:
        consumer.close()


def test_topics_are_never_made_by_mistake(bootstrap_servers: str) -> None:
    AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics("no-such-topic", timeout=10)

    topics = AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=10).topics
    assert "no-such-topic" not in topics


def test_broker_listens_on_loopback_alone_and_keeps_its_data_private(broker: EmbeddedBroker) -> None:
    assert broker.bootstrap_servers.startswith("127.0.0.1:")
    assert stat.S_IMODE(broker.data_dir.stat().st_mode) == 0o700


@pytest.mark.slow
def test_broker_keeps_data_and_port_over_stop_kill_and_pause(tmp_path: Path) -> None:
    with quick_broker(tmp_path / "data") as broker:
        servers, first_pid = broker.bootstrap_servers, broker.pid
        _create_topic(servers, "kept")
        producer = Producer(QUIET | {"bootstrap.servers": servers})
        producer.produce("kept", b"value")
        assert producer.flush(20) == 0

        broker.restart()
        assert (broker.bootstrap_servers, broker.pid != first_pid) == (servers, True)
        controller_log = tmp_path / "data" / "controller.log"
        assert not controller_log.exists()  # nothing to fence: it was new, and then it shut down

        broker.kill()
        assert not broker.is_running
        assert not is_ready(broker.port)
        broker.start()
        assert "Fencing broker 1" in controller_log.read_text()

        broker.pause()
        assert broker.is_running
        assert not is_ready(broker.port)
        broker.resume()
        assert _read_one(servers, "kept") == b"value"
    assert (tmp_path / "data" / "log").is_dir()

    with quick_broker(tmp_path / "data") as later:
        assert "kept" in AdminClient({"bootstrap.servers": later.bootstrap_servers}).list_topics(timeout=10).topics


PARENT = """
import time
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java
broker = EmbeddedBroker().start()
broker.pause()
print(broker.pid, broker.data_dir, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_broker_dies_with_its_parent_killed_by_9() -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, env={**os.environ, **quick_java()}, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid, data_dir = parent.stdout.readline().split()

        parent.kill()
        parent.wait()

    assert _is_gone_soon(int(pid))
    assert _is_soon(lambda: not Path(data_dir).exists())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
def test_broker_dies_with_its_supervisor() -> None:
    with quick_broker() as broker:
        assert broker._supervisor is not None
        os.kill(broker._supervisor.pid, signal.SIGKILL)

        assert _is_gone_soon(broker.pid)


def up(*options: str) -> subprocess.Popen[str]:
    """Run `kmq up`."""
    command = [sys.executable, "-m", "kmq_spark.cli.main", "up", *options]
    environment = {**os.environ, **quick_java()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_up_on_the_port_of_another_broker_is_refused(broker: EmbeddedBroker) -> None:
    """The other broker would answer as if it were ours."""
    process = up("--port", str(broker.port))
    out, errors = process.communicate(timeout=ENDS_S)
    assert (process.returncode, out) == (1, "")
    assert f"did not start on 127.0.0.1:{broker.port}: Address already in use; choose a free port" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the broker's process is found in /proc")
def test_log_of_a_broker_that_ended_by_itself_outlives_it() -> None:
    process = up()
    assert process.stdout is not None
    assert "broker ready" in process.stdout.readline()
    (supervisor,) = _children(process.pid)
    (jvm,) = _children(supervisor)
    os.kill(jvm, signal.SIGKILL)
    _, errors = process.communicate(timeout=ENDS_S)
    assert process.returncode == 1
    folder = Path(errors.strip().splitlines()[-1].rpartition("see its log in ")[2])
    assert {file.name for file in folder.iterdir()} >= {"console.log"}


def _children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_gone_soon(pid: int) -> bool:
    """Return whether a process ends within some seconds."""

    def is_gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # A zombie whose new parent, in a container, never reaps it.
        status = Path(f"/proc/{pid}/stat")
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"

    return _is_soon(is_gone)


def _is_soon(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes to hold."""
    give_up_at = time.monotonic() + COMES_S
    while time.monotonic() < give_up_at:
        if condition():
            return True
        time.sleep(0.05)
    return False
