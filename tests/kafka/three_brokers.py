"""Three brokers on this machine, for what a single one cannot show: replicas."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kmq_spark.local import supervisor
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.broker_settings import log_properties, server_properties
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java

if TYPE_CHECKING:
    from pathlib import Path

_READY_S = 60


class ThreeBrokers:
    """An embedded broker, which is the controller too, and two followers that end with this process."""

    def __init__(self, folder: Path) -> None:
        """Start them and wait until all three are known."""
        self._folder = folder
        # What a cluster of three has: a default of three replicas, and Kafka's own default of min.insync.replicas=1.
        self.first = EmbeddedBroker(folder / "1", extra={"default.replication.factor": "3"}).start()
        self.bootstrap_servers = self.first.bootstrap_servers
        self._followers = [self._follower(node) for node in (2, 3)]
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        until = time.monotonic() + _READY_S
        while len(_brokers(admin)) < len(self._followers) + 1:
            assert time.monotonic() < until, self._console()
            time.sleep(0.1)

    def close(self) -> None:
        """End them."""
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.close()  # the supervisor kills its child
            follower.wait(20)
        self.first.kill()

    def _follower(self, node: int) -> subprocess.Popen[str]:
        folder = self._folder / str(node)
        folder.mkdir()
        controller_port = int((self.first.data_dir / "controller.port").read_text())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        extra = {
            "process.roles": "broker", "node.id": str(node), "listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "default.replication.factor": "3",
        }  # fmt: skip
        settings = folder / "server.properties"
        settings.write_text(server_properties(folder, port=port, controller_port=controller_port, extra=extra))
        (folder / "log4j2.properties").write_text(log_properties(folder / "kafka.log"))
        java = [
            *(str(find_java()), "-Xmx256m", "-XX:+UseSerialGC"),
            f"-Dlog4j2.configurationFile={folder}/log4j2.properties",
            *("-cp", os.pathsep.join(map(str, jar_paths("broker")))),
        ]  # fmt: skip
        meta = (self.first.data_dir / "log" / "meta.properties").read_text().splitlines()
        cluster_id = next(line.partition("=")[2] for line in meta if line.startswith("cluster.id="))
        format_log = [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", f"--config={settings}"]
        done = subprocess.run(format_log, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        with (folder / "console.log").open("wb") as console:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(supervisor.__file__), "", *java, "kafka.Kafka", str(settings)],
                stdin=subprocess.PIPE, stdout=console, stderr=console, text=True,
            )  # fmt: skip

    def _console(self) -> str:
        return "\n".join((self._folder / str(node) / "kafka.log").read_text()[-2_000:] for node in (2, 3))


def _brokers(admin: AdminClient) -> dict[int, object]:
    try:
        return dict(admin.list_topics(timeout=10).brokers)
    except KafkaException:
        return {}
