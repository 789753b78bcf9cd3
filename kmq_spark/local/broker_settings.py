"""
Generate the configuration files of an embedded broker: server properties and log settings.

Rule 1: each setting that differs from Kafka's default has a comment with the reason.
Rule 2: loopback only; these settings are not for production brokers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def server_properties(data_dir: Path, *, port: int, controller_port: int, extra: Mapping[str, str]) -> str:
    """
    Return the text of `server.properties` for one node that is broker and controller.

    The log contains *controller_port*, so it must not change; *extra* goes before what this module sets.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
        "log.dirs": str(data_dir / "log"),
        # Topics are created explicitly (kmq queue create); a mistyped name must be an error.
        "auto.create.topics.enable": "false",
        # One node: internal topics have one replica, and few partitions because each costs files and start-up time.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        # Consumers of a demo or a test start one by one; the default delay would cost three seconds each time.
        "group.initial.rebalance.delay.ms": "0",
        # KIP-848 groups: the partitions of a killed consumer are reassigned within seconds (default: 45 s).
        "group.consumer.min.session.timeout.ms": "6000",
        "group.consumer.session.timeout.ms": "6000",
        "group.consumer.min.heartbeat.interval.ms": "1000",
        "group.consumer.heartbeat.interval.ms": "1000",
        # A broker that no longer answers is fenced after this time (default: 9 s).
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # For a laptop: few threads, and a cleaner buffer that fits into the heap (default: 128 MiB).
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.threads": "1",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        # Index files are preallocated for each segment; keep them small because a demo has many partitions.
        "log.index.size.max.bytes": str(1024 * 1024),
    }
    return "".join(f"{name}={value}\n" for name, value in (settings | dict(extra)).items())


def controller_properties(data_dir: Path, controller_port: int) -> str:
    """Return the text of settings for the same node without its broker."""
    address = f"127.0.0.1:{controller_port}"
    settings = {
        "process.roles": "controller",
        "node.id": "1",
        "listeners": f"CONTROLLER://{address}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.bootstrap.servers": address,
        "log.dirs": str(data_dir / "log"),
        # Short, because there is no broker that could be fenced by mistake.
        "broker.session.timeout.ms": "500",
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def log_properties(log_file: Path, controller_level: str = "warn") -> str:
    """Return log4j2 settings: warnings and errors, to a file of at most 20 MB."""
    return f"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {log_file}
appender.file.filePattern = {log_file}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}} %p %c{{1}}: %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
logger.controller.name = org.apache.kafka.controller
logger.controller.level = {controller_level}
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""
