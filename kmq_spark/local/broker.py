"""
A real Kafka broker in a process of its own, for the demo, the tests and the notebooks. Not for production.

Rule 1: it listens on 127.0.0.1 only, on free ports, and keeps its data in a directory that nobody else can read.
Rule 2: it never outlives the process that started it, killed with -9 or not: see supervisor.py.
Rule 3: `start` returns when the broker answers, or raises with the broker's own last words.

Source: Kafka quickstart, KRaft mode, one combined node.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kmq_spark.errors import SetupError
from kmq_spark.local.broker_settings import log_properties, server_properties
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java
from kmq_spark.local.probe import is_ready

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.05
_PORT_ATTEMPTS = 3
_LAST_LINES = 12
_LOG_FILES = ("kafka.log", "console.log")

_SUPERVISOR = Path(__file__).with_name("supervisor.py")

# A gigabyte at most: it shares a laptop with Spark. The serial collector needs the fewest threads.
_JVM_FLAGS = ("-Xms256m", "-Xmx1g", "-XX:+UseSerialGC", "-Djava.awt.headless=true")
# Formatting runs for a second: the quick compiler alone, and no more heap than it takes.
_FORMAT_FLAGS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class EmbeddedBroker:
    """
    One Kafka broker, started and ended by this process.

    A context manager; `start` and `close` do the same by hand. It may be stopped, killed, paused and started again on
    the same data and port, which is what the fault tests do.

    Attributes:
        data_dir: Everything the broker writes, its log files `kafka.log` and `console.log` too.
        port: Where clients connect, on 127.0.0.1; 0 before the first start where none was given.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int | None = None,
        extra: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Remember the settings; nothing is started yet.

        Args:
            data_dir: Where to keep the data. A directory of an earlier broker continues with its topics. By default a
                temporary one, removed by `close` or with this process.
            port: Port on 127.0.0.1; a free one by default.
            extra: Kafka broker settings that add to or replace ours.
            environment: Environment variables of its process, in addition to those of this one.
        """
        self._is_temporary = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="kmq-broker-")) if data_dir is None else data_dir.absolute()
        self.port = port or 0
        self._port_is_given = port is not None
        self._extra = dict(extra or {})
        self._environment = dict(environment or {})
        self._supervisor: subprocess.Popen[str] | None = None
        self._pid = 0
        owner = os.getpid()  # a forked child must not remove the data of its parent
        self._remove_data = weakref.finalize(self, _remove, self.data_dir, owner) if self._is_temporary else None

    @property
    def bootstrap_servers(self) -> str:
        """What a Kafka client connects to: `127.0.0.1:<port>`."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the broker's JVM; 0 before the first start."""
        return self._pid

    @property
    def is_running(self) -> bool:
        """True from `start` until the process has ended; a paused broker is running."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> Self:
        """
        Start the broker and wait until it is ready; fetch its jars first where the cache lacks them.

        Returns:
            This broker.

        Raises:
            SetupError: Java or the jars are missing, the port is taken, or the broker ended or stayed silent; its last
                log lines are in the message.
        """
        if self.is_running:
            return self
        if self._port_is_given:
            # Otherwise the broker that has the port answers our probe while ours still starts, and seems to be ours.
            self._check_port_is_free()
        java, class_path = find_java(), os.pathsep.join(map(str, jar_paths("broker")))
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._prepare(java, class_path)
            self._launch(java, class_path)
            if self._wait_until_ready():
                break
            failure = self._last_words()
            self.kill()
            # Somebody took the free port between our look and the broker's bind: look again.
            if self._port_is_given or "Address already in use" not in failure or attempt == _PORT_ATTEMPTS:
                message = f"the embedded broker did not start on {self.bootstrap_servers}; its last lines:\n{failure}"
                raise SetupError(message)
            self._forget_ports()
        self._port_is_given = True  # clients know it now: a restart keeps it
        logger.warning("embedded broker on %s, data in %s: not for production", self.bootstrap_servers, self.data_dir)
        return self

    def stop(self) -> None:
        """End the broker cleanly, data kept; killed where it takes longer than 20 seconds."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the broker at once, as `kill -9` does; data kept."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the broker in its tracks (SIGSTOP): connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused broker go on."""
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop where it runs, then start on the same data and port."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """End the broker and remove its data where they are temporary."""
        # Data that nobody will read need no clean shutdown, which takes a second.
        self._end(signal.SIGKILL if self._is_temporary else signal.SIGTERM)
        if self._remove_data is not None:
            self._remove_data()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def save_logs(self) -> Path:
        """
        Copy the broker's logs to a folder that stays when its data are removed.

        Returns:
            The folder, with `kafka.log` and `console.log`.
        """
        folder = Path(tempfile.mkdtemp(prefix="kmq-broker-log-"))
        for name in _LOG_FILES:
            if (self.data_dir / name).exists():
                shutil.copy(self.data_dir / name, folder)
        return folder

    def _check_port_is_free(self) -> None:
        with socket.socket() as probe:
            # As the broker does: connections of an earlier one that are not quite closed are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
                probe.listen()
            except OSError as error:
                message = (
                    f"the embedded broker did not start on {self.bootstrap_servers}: {error.strerror}; choose a free "
                    "port, or none to get one"
                )
                raise SetupError(message) from error

    def _prepare(self, java: Path, class_path: str) -> None:
        """Write the settings; format the log directory where it is new."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        controller_port_file = self.data_dir / "controller.port"
        is_new = not controller_port_file.exists()
        controller_port = _free_port() if is_new else int(controller_port_file.read_text())
        self.port = self.port or _free_port()
        properties = server_properties(
            self.data_dir, port=self.port, controller_port=controller_port, extra=self._extra
        )
        (self.data_dir / "server.properties").write_text(properties)
        (self.data_dir / "log4j2.properties").write_text(log_properties(self.data_dir / "kafka.log"))
        if not (self.data_dir / "log" / "meta.properties").exists():
            self._format(java, class_path)
        controller_port_file.write_text(str(controller_port))

    def _format(self, java: Path, class_path: str) -> None:
        """Give the log directory its cluster id, and make this node the only voter."""
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        jvm = [str(java), *_FORMAT_FLAGS, *self._log_flags(), "-cp", class_path]
        properties = str(self.data_dir / "server.properties")
        # With `=`: one id in 64 begins with a dash, which would be read as an option.
        command = [
            *(*jvm, "kafka.tools.StorageTool", "format", "--standalone"),
            *(f"--cluster-id={cluster_id}", f"--config={properties}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_START_TIMEOUT_S)
        if done.returncode != 0:
            message = f"cannot format {self.data_dir} for the embedded broker: {(done.stdout + done.stderr).strip()}"
            raise SetupError(message)

    def _launch(self, java: Path, class_path: str) -> None:
        """Start the supervisor, which starts the JVM."""
        server = [*_JVM_FLAGS, *self._log_flags(), "-cp", class_path, "kafka.Kafka"]
        command = [str(java), *server, str(self.data_dir / "server.properties")]
        remove = str(self.data_dir) if self._is_temporary else ""
        with (self.data_dir / "console.log").open("wb") as console:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), remove, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                text=True,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl+C is for us: clients stop first, the broker last
            )
        if self._supervisor.stdout is None:  # not with PIPE; for the type checker
            raise AssertionError
        line = self._supervisor.stdout.readline()
        self._pid = int(line) if line.strip() else 0

    def _wait_until_ready(self) -> bool:
        """Wait for the broker; False when it ended or stayed silent."""
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        while self.is_running and time.monotonic() < give_up_at:
            if is_ready(self.port):
                return self.is_running  # not somebody else's broker on a port that ours failed to bind
            time.sleep(_POLL_INTERVAL_S)
        return False

    def _signal(self, number: signal.Signals) -> None:
        """Signal the JVM, never a process that got its id after it."""
        if self.is_running and self._pid:
            os.kill(self._pid, number)

    def _end(self, number: signal.Signals) -> None:
        """Signal the JVM and wait until the supervisor has reaped it."""
        if self._supervisor is None:
            return
        self._signal(number)
        try:
            self._supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._supervisor.wait()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()
        self._supervisor = None

    def _forget_ports(self) -> None:
        """Choose new ports at the next attempt, which needs a new voter record, so a new log."""
        self.port = 0
        (self.data_dir / "controller.port").unlink()
        shutil.rmtree(self.data_dir / "log")

    def _last_words(self) -> str:
        """Return the last lines that the broker wrote."""
        lines: list[str] = []
        for name in _LOG_FILES:
            file = self.data_dir / name
            lines += file.read_text(errors="replace").splitlines()[-_LAST_LINES:] if file.exists() else []
        return "\n".join(lines) or "(none)"

    def _log_flags(self) -> list[str]:
        """Return the JVM flags that name the log settings."""
        return [f"-Dlog4j2.configurationFile={self.data_dir / 'log4j2.properties'}"]


def _free_port() -> int:
    """Return a TCP port on the loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _remove(directory: Path, owner: int) -> None:
    """Remove temporary data, in the process that made them only."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
