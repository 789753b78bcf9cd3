"""Three brokers on this machine, for what a single one cannot show: replicas, and leaders that change."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from confluent_kafka import ElectionType, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from faults.clocks import FalseClock
from faults.proxy import Proxy
from kmq_spark.local.cluster import EmbeddedCluster
from kmq_spark.local.probe import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kmq_spark.local.broker import EmbeddedBroker

_READY_S, _ELECTION_S = 180, 30
_BY_RACK = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


class ThreeBrokers(EmbeddedCluster):
    """Brokers of which one can be dead or suspended, each with a clock that is ahead, and who of them leads."""

    def __init__(
        self,
        extra: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        ahead_ms: Sequence[int] = (),
    ) -> None:
        super().__init__(extra=extra, environment=environment)
        for broker, its_ms in zip(self.brokers, ahead_ms, strict=False):
            broker.environment |= FalseClock(its_ms).environment()
        self.start()
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

    def _settings(self, number: int, probe_port: int) -> dict[str, str]:
        # A client with a `client.rack` reads from the broker of that rack, also where another one leads.
        return super()._settings(number, probe_port) | {"broker.rack": str(number), "replica.selector.class": _BY_RACK}

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition; -1 = none, or the broker that answers does not know it."""
        with contextlib.suppress(KafkaException):
            partitions = self._admin.list_topics(topic, timeout=10).topics[topic].partitions
            return int(partitions[partition].leader) if partition in partitions else -1
        return -1

    def leading(self, topic: str, partition: int = 0) -> EmbeddedBroker:
        """Wait until a partition has a leader; return its broker."""
        self.wait(lambda: self.leader(topic, partition) != -1)
        return self.brokers[self.leader(topic, partition) - 1]

    def wait_in_sync(self) -> None:
        """Wait until all brokers run and have every record."""
        self.wait(self._is_in_sync)

    def _is_in_sync(self) -> bool:
        with contextlib.suppress(KafkaException):
            topics = self._admin.list_topics(timeout=10).topics.values()
            return all(len(each.isrs) == len(each.replicas) for topic in topics for each in topic.partitions.values())
        return False

    def wait_deposed(self, broker: EmbeddedBroker, topic: str, partition: int = 0) -> None:
        """Wait until another broker leads a partition."""
        self.wait(lambda: self.leader(topic, partition) not in {-1, self.brokers.index(broker) + 1})

    def bring_back(self, broker: EmbeddedBroker, topic: str, partition: int = 0) -> None:
        """Start a dead broker again, and let it lead a partition again that it led first."""
        broker.start()
        place = TopicPartition(topic, partition)

        def is_back() -> bool:
            # Refused until the replica has caught up. The client cannot pass a time-out: it raises SystemError.
            with contextlib.suppress(KafkaException):
                self._admin.elect_leaders(ElectionType.PREFERRED, [place]).result(_ELECTION_S)
            return self.leading(topic, partition) is broker

        self.wait(is_back)

    def elect_preferred(self) -> None:
        """Give every partition back to the broker that led it first, where that one is in sync."""
        with contextlib.suppress(KafkaException):
            self._admin.elect_leaders(ElectionType.PREFERRED, None).result(_ELECTION_S)

    def controller(self) -> EmbeddedBroker:
        """Wait until a controller is active; return its broker."""
        self.wait(lambda: self._active() != -1)
        return self.brokers[self._active() - 1]

    def wait_other_controller(self, broker: EmbeddedBroker) -> None:
        """Wait until another controller is active."""
        self.wait(lambda: self._active() not in {-1, self.brokers.index(broker) + 1})

    def _active(self) -> int:
        """Return the node of the active controller, -1 = none. Only files say it: what clients learn is any broker."""
        files = [broker.data_dir / "log" / "__cluster_metadata-0" / "quorum-state" for broker in self.brokers]
        states = [json.loads(file.read_text()) for file in files]
        return int(max((state["leaderEpoch"], state["leaderId"]) for state in states)[1])

    @staticmethod
    def wait(is_done: Callable[[], bool]) -> None:
        """Wait until something holds of the brokers."""
        until_s = time.monotonic() + _READY_S
        while not is_done():
            if time.monotonic() > until_s:
                raise RuntimeError(f"the three brokers did not do what they should within {_READY_S} s")
            time.sleep(0.1)


class ProxiedBrokers(ThreeBrokers):
    """Brokers that clients reach through a proxy each, and each other without."""

    def __init__(self, extra: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.proxies: list[Proxy] = []
        super().__init__(extra, environment)

    def _settings(self, number: int, probe_port: int) -> dict[str, str]:
        self.proxies.append(Proxy(probe_port))
        between = f"BROKERS://127.0.0.1:{free_port()}"
        controllers = f"CONTROLLER://127.0.0.1:{self._controllers[number - 1]}"
        return super()._settings(number, probe_port) | {
            "listeners": f"PLAINTEXT://127.0.0.1:{probe_port},{between},{controllers}",
            "advertised.listeners": f"PLAINTEXT://{self.proxies[-1].address},{between}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,BROKERS:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "BROKERS",
        }

    def close(self) -> None:
        """Kill the brokers, and close the proxies."""
        super().close()
        for proxy in self.proxies:
            proxy.close()
