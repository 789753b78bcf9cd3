"""Three brokers on this machine, for what a single one cannot show: replicas."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from confluent_kafka import ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmq_spark.coordination import create_coordination_topic
from kmq_spark.local import supervisor
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.broker_settings import log_properties, server_properties
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java
from kmq_spark.local.probe import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_READY_S, _ELECTION_S = 180, 30
FOLLOWERS = (2, 3)


class ThreeBrokers:
    """An embedded broker, which is the controller too, and two followers that end with this process."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder, self._environment = folder, dict(environment or {})
        # What a cluster of three has: a default of three replicas, and Kafka's own default of min.insync.replicas=1.
        extra = {"default.replication.factor": "3"}
        self.first = EmbeddedBroker(folder / "1", extra=extra, environment=environment).start()
        self.bootstrap_servers = self.first.bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers})
        self._commands = {node: self._follower(node) for node in FOLLOWERS}
        self._followers = {node: self._start(node) for node in FOLLOWERS}
        self._wait(lambda: len(_brokers(self._admin)) == len(FOLLOWERS) + 1)

    def close(self) -> None:
        """End them."""
        for node in FOLLOWERS:
            self._kill(node)
        self.first.kill()

    def coordination_topic(self, prefix: str) -> str:
        """Create coordination topics of one partition until a follower leads one; return its name."""
        # Kafka chooses the leaders of one-partition topics in turn. The first broker is the controller, and stays.
        for number in range(2 * len(FOLLOWERS) + 2):
            topic = f"{prefix}-{number}"
            create_coordination_topic(
                self.bootstrap_servers, topic=topic, partitions=1, replication_factor=3, timeout=60
            )
            self._wait(partial(self._has_leader, topic))
            if self.leader(topic) in FOLLOWERS:
                return topic
        raise RuntimeError("no topic is led by a follower")

    def leader(self, topic: str) -> int:
        """Return the node that leads partition 0 of a topic; -1 = none, or the broker that answers does not know it."""
        partitions = self._admin.list_topics(topic, timeout=10).topics[topic].partitions
        return int(partitions[0].leader) if partitions else -1

    def _has_leader(self, topic: str) -> bool:
        return self.leader(topic) != -1

    def kill_leader(self, topic: str) -> int:
        """Kill the follower that leads partition 0 of a topic, wait until another leads; return the dead node."""
        node = self.leader(topic)
        if node not in FOLLOWERS:
            raise RuntimeError(f"cannot kill the leader of {topic}: got node {node}, one of {FOLLOWERS}")
        self._kill(node)
        self._wait(lambda: self.leader(topic) not in {-1, node})
        return node

    def bring_back(self, node: int, topic: str) -> None:
        """Start a dead follower again, and let it lead partition 0 of a topic again."""
        self._followers[node] = self._start(node)
        partition = TopicPartition(topic, 0)

        def is_back() -> bool:
            # Refused until the replica has caught up. The client cannot pass a time-out: it raises SystemError.
            with contextlib.suppress(KafkaException):
                self._admin.elect_leaders(ElectionType.PREFERRED, [partition]).result(_ELECTION_S)
            return self.leader(topic) == node

        self._wait(is_back)

    def _kill(self, node: int) -> None:
        follower = self._followers[node]
        assert follower.stdin is not None
        follower.stdin.close()  # the supervisor kills its child
        follower.wait(20)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _READY_S
        while not is_done():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the three brokers are not ready within {_READY_S} s: {self._console()}")
            time.sleep(0.1)

    def _follower(self, node: int) -> list[str]:
        """Make the files of a follower; return the command that starts it."""
        folder = self._folder / str(node)
        folder.mkdir()
        controller_port = int((self.first.data_dir / "controller.port").read_text())
        port = free_port()
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
        return [sys.executable, "-I", "-S", str(supervisor.__file__), "", *java, "kafka.Kafka", str(settings)]

    def _start(self, node: int) -> subprocess.Popen[str]:
        with (self._folder / str(node) / "console.log").open("ab") as console:
            return subprocess.Popen(
                self._commands[node], stdin=subprocess.PIPE, stdout=console, stderr=console, text=True,
                env={**os.environ, **self._environment},
            )  # fmt: skip

    def _console(self) -> str:
        return "\n".join((self._folder / str(node) / "kafka.log").read_text()[-2_000:] for node in FOLLOWERS)


def _brokers(admin: AdminClient) -> dict[int, object]:
    try:
        return dict(admin.list_topics(timeout=10).brokers)
    except KafkaException:
        return {}
