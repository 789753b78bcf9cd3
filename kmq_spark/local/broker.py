"""
Run a real Kafka broker in a separate process, for the demo, the tests and the notebooks. Not for production.

Rule 1: the broker listens only on 127.0.0.1, on free ports. Its data directory is readable only for its user.
Rule 2: the broker ends when the process that started it ends, even if that process is killed (supervisor.py).
Rule 3: After a kill the controller runs alone first, until it has fenced the dead broker, as the controllers of a
production cluster do. Otherwise the broker starts with metadata in which it still leads its partitions, and it loses
them a moment later. Kafka 4.3 then writes no end markers for a transaction that was being committed (KAFKA-20734), and
no consumer can read its partitions any further. In a cluster (cluster.py) the other controllers do that.

Source: Kafka quickstart, KRaft mode, one combined node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kmq_spark.errors import SetupError
from kmq_spark.local.broker_settings import controller_properties, log_properties, server_properties
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import collector, find_java
from kmq_spark.local.probe import free_port, is_ready

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.05
_PORT_ATTEMPTS = 3
_LAST_LINES = 12
_LOG_FILES = ("kafka.log", "console.log")

_FENCED = re.compile("handleBrokerFenced.*Processed maybeFenceStaleBroker", re.DOTALL)
"""What the controller logs when it fences a broker, and when that is in its log on disk."""

_ACTIVE = "Becoming the active controller"
"""What the controller logs when it begins to watch brokers."""

_FENCED_WAIT_S = 10.0
"""
How long the active controller has to fence the broker. It never does if the broker was killed before it was unfenced.
"""

_SUPERVISOR = Path(__file__).with_name("supervisor.py")

# The heap is small, because Spark runs on the same machine.
_JVM_FLAGS = ("-Xms256m", "-Djava.awt.headless=true")
_ALONE_FLAGS = ("-Xmx1g",)
# Several start at the same time: the fast compiler only.
_MEMBER_FLAGS = ("-Xmx512m", "-XX:TieredStopAtLevel=1")
# Formatting takes one second: use the fast compiler only, and a small heap.
_FORMAT_FLAGS = ("-Xmx128m", "-XX:TieredStopAtLevel=1")


@dataclass(frozen=True)
class Member:
    """What a broker of a cluster has and one alone has not; its properties come as *extra*."""

    node_id: int
    is_alone: bool
    probe_port: int
    format_options: tuple[str, ...]
    removed: str = ""
    """Folder that is removed with the parent; empty = none."""

    tls: ssl.SSLContext | None = None
    """For the probe."""


class EmbeddedBroker:
    """
    A Kafka broker that this process starts and ends.

    Use it as a context manager, or call `start` and `close`. It can be stopped, killed, paused and started again with
    the same data and port, as the fault tests do.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        port: int | None = None,
        extra: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        member: Member | None = None,
    ) -> None:
        self._is_temporary = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="kmq-broker-")) if data_dir is None else data_dir.absolute()
        self.port = port or 0
        self._port_is_given = port is not None
        self._extra = dict(extra or {})
        self.environment = {**os.environ, **(environment or {})}
        self._member, self._flags = member, _ALONE_FLAGS if member is None or member.is_alone else _MEMBER_FLAGS
        self._supervisor: subprocess.Popen[str] | None = None
        self._pid = 0
        owner = os.getpid()  # a forked child must not remove the data of its parent
        self._remove_data = weakref.finalize(self, remove_own, self.data_dir, owner) if self._is_temporary else None

    @property
    def bootstrap_servers(self) -> str:
        """Bootstrap address for Kafka clients: `127.0.0.1:<port>`."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the broker's JVM; 0 before the first start."""
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether the broker process runs; a paused broker counts as running."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> Self:
        """Start the broker and wait until it is ready; fetch its jars first if they are not in the cache."""
        if self.is_running:
            return self
        if self._port_is_given:
            # Otherwise another broker on this port would answer the readiness probe while ours still starts.
            self._check_port_is_free()
        java, class_path = find_java(), os.pathsep.join(map(str, jar_paths("broker")))
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._prepare(java, class_path)
            if self._was_killed() and (self._member is None or self._member.is_alone):
                self._fence(java, class_path)
            self._launch(java, class_path)
            if self._wait_until_ready():
                break
            failure = self._last_words()
            self.kill()
            # Another process took the port between our check and the broker's bind: try again with a new port.
            if self._port_is_given or "Address already in use" not in failure or attempt == _PORT_ATTEMPTS:
                message = f"the embedded broker did not start on {self.bootstrap_servers}; its last lines:\n{failure}"
                raise SetupError(message)
            self._forget_ports()
        self._port_is_given = True  # clients use this port, so a restart must keep it
        logger.warning("embedded broker on %s, data in %s: not for production", self.bootstrap_servers, self.data_dir)
        return self

    def stop(self) -> None:
        """Shut down the broker and keep its data; kill it if that takes more than 20 seconds."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the broker (SIGKILL) and keep its data."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Pause the broker (SIGSTOP): connections stay open, but requests get no answer. Wait until it stands still."""
        self._signal(signal.SIGSTOP)
        # On a busy machine a thread may answer one more request after the signal.
        while self.is_running and self._has_running_threads():
            time.sleep(_POLL_INTERVAL_S)

    def resume(self) -> None:
        """Continue a paused broker (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop the broker if it runs, then start it with the same data and port."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """End the broker, and remove its data if they are temporary."""
        # Temporary data are removed anyway, so skip the clean shutdown, which takes a second.
        self._end(signal.SIGKILL if self._is_temporary else signal.SIGTERM)
        if self._remove_data is not None:
            self._remove_data()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_logs(self) -> Path:
        """Copy the broker's logs to a folder that is kept when its data are removed; return the folder."""
        folder = Path(tempfile.mkdtemp(prefix="kmq-broker-log-"))
        for name in _LOG_FILES:
            if (self.data_dir / name).exists():
                shutil.copy(self.data_dir / name, folder)
        return folder

    def _check_port_is_free(self) -> None:
        with socket.socket() as probe:
            # The broker sets this option too: connections of an earlier broker in TIME_WAIT do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
                probe.listen()
            except OSError as error:
                raise SetupError(
                    f"the embedded broker did not start on {self.bootstrap_servers}: {error.strerror}; choose a free "
                    "port, or none to get one"
                ) from error

    def _prepare(self, java: Path, class_path: str) -> None:
        """Write the settings; format the log directory if it is new."""
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        controller_port_file = self.data_dir / "controller.port"
        is_new = not controller_port_file.exists()
        controller_port = free_port() if is_new else int(controller_port_file.read_text())
        self.port = self.port or free_port()
        properties = server_properties(
            self.data_dir, port=self.port, controller_port=controller_port, extra=self._extra
        )
        (self.data_dir / "server.properties").write_text(properties)
        (self.data_dir / "server.log4j2.properties").write_text(log_properties(self.data_dir / "kafka.log"))
        if not (self.data_dir / "log" / "meta.properties").exists():
            self._format(java, class_path)
        controller_port_file.write_text(str(controller_port))

    def _format(self, java: Path, class_path: str) -> None:
        """Format the log directory; of a broker alone with a new cluster id and this node as the only voter."""
        # With `=`, because one id in 64 begins with a dash, which would be parsed as an option.
        options = self._member.format_options if self._member else ("--standalone", f"--cluster-id={new_id()}")
        words = [
            *(*_FORMAT_FLAGS, *collector(), self._log_flag("server"), "-cp", class_path),
            *("kafka.tools.StorageTool", "format", *options, f"--config={self.data_dir / 'server.properties'}"),
        ]
        # In a file: passwords of users must not be visible in `ps`.
        arguments = self.data_dir / "format.arguments"
        arguments.touch(mode=0o600)
        arguments.write_text("".join('"{}"\n'.format(re.sub(r'(["\\])', r"\\\1", word)) for word in words))
        done = subprocess.run(
            [java, f"@{arguments}"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_TIMEOUT_S,
        )
        arguments.unlink()
        if done.returncode != 0:
            message = f"cannot format {self.data_dir} for the embedded broker: {(done.stdout + done.stderr).strip()}"
            raise SetupError(message)

    def _was_killed(self) -> bool:
        """Whether the broker had topics, and did not shut down. Formatting makes the controller's log."""
        log = self.data_dir / "log"
        has_topics = any(folder.name != "__cluster_metadata-0" for folder in log.glob("*-0"))
        return has_topics and not (log / ".kafka_cleanshutdown").exists()

    def _fence(self, java: Path, class_path: str) -> None:
        """Run the controller until it has fenced the dead broker."""
        log = self.data_dir / "controller.log"
        log.unlink(missing_ok=True)
        controller_port = int((self.data_dir / "controller.port").read_text())
        (self.data_dir / "controller.properties").write_text(controller_properties(self.data_dir, controller_port))
        (self.data_dir / "controller.log4j2.properties").write_text(log_properties(log, controller_level="debug"))
        self._launch(java, class_path, "controller")
        give_up_at, is_active = time.monotonic() + _START_TIMEOUT_S, False
        while self.is_running and time.monotonic() < give_up_at:
            text = log.read_text(errors="replace") if log.exists() else ""
            if _FENCED.search(text):
                break
            if _ACTIVE in text and not is_active:
                give_up_at, is_active = time.monotonic() + _FENCED_WAIT_S, True
            time.sleep(_POLL_INTERVAL_S)
        self.kill()

    def _launch(self, java: Path, class_path: str, settings: str = "server") -> None:
        """Start the supervisor, which starts the JVM with the settings of this name."""
        server = [*_JVM_FLAGS, *collector(), *self._flags, self._log_flag(settings), "-cp", class_path, "kafka.Kafka"]
        command = [str(java), *server, str(self.data_dir / f"{settings}.properties")]
        own = str(self.data_dir) if self._is_temporary else ""
        remove = self._member.removed if self._member else own
        with (self.data_dir / "console.log").open("wb") as console:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), remove, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                text=True,
                env=self.environment,
                start_new_session=True,  # Ctrl+C must not reach the broker: clients stop first, the broker last
            )
        assert self._supervisor.stdout is not None  # with PIPE
        line = self._supervisor.stdout.readline()
        self._pid = int(line) if line.strip() else 0

    def _wait_until_ready(self) -> bool:
        """Wait until the broker is ready; return False if it ended or did not become ready in time."""
        give_up_at = time.monotonic() + _START_TIMEOUT_S
        its = self._member
        while self.is_running and time.monotonic() < give_up_at:
            if is_ready(its.probe_port, its.node_id, its.tls) if its else is_ready(self.port):
                return self.is_running  # False: another broker answered, because ours failed to bind the port
            time.sleep(_POLL_INTERVAL_S)
        return False

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the JVM, never to a later process with the same process id."""
        if self.is_running and self._pid:
            os.kill(self._pid, number)

    def _has_running_threads(self) -> bool:
        """Return whether a thread of the JVM is not stopped; False where the system has no `/proc`."""
        for state in Path("/proc", str(self._pid), "task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                # After the name of the program, which may contain anything.
                if state.read_text(errors="replace").rpartition(")")[2].split()[0] not in {"T", "t", "Z", "X"}:
                    return True
        return False

    def _end(self, number: signal.Signals) -> None:
        """Send a signal to the JVM and wait until the supervisor has reaped it."""
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
        """Discard the ports, and the log, which contains a voter record with the controller port."""
        self.port = 0
        (self.data_dir / "controller.port").unlink()
        shutil.rmtree(self.data_dir / "log")

    def _log_flag(self, settings: str) -> str:
        """Return the JVM flag for the log settings of this name."""
        return f"-Dlog4j2.configurationFile={self.data_dir / f'{settings}.log4j2.properties'}"

    def _last_words(self) -> str:
        lines: list[str] = []
        for name in _LOG_FILES:
            file = self.data_dir / name
            lines += file.read_text(errors="replace").splitlines()[-_LAST_LINES:] if file.exists() else []
        return "\n".join(lines) or "(none)"


def new_id() -> str:
    """Return a new id of a cluster or of a log directory."""
    return urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def remove_own(directory: Path, owner: int) -> None:
    """Remove temporary data, but only in the process that created them."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
