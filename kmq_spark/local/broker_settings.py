"""
The files that an embedded broker starts from: server properties and log settings.

Rule 1: each setting that is not Kafka's default has its reason beside it.
Rule 2: the loopback only; nothing here belongs on a production broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def server_properties(data_dir: Path, *, port: int, controller_port: int, extra: Mapping[str, str]) -> str:
    """
    Return the text of `server.properties` for one node that is broker and controller.

    Args:
        data_dir: Directory of the log.
        port: Where clients connect, on 127.0.0.1.
        controller_port: Where the broker half reaches the controller half; written into the log, so it must not change.
        extra: Kafka settings that add to or replace ours.
    """
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
        "log.dirs": str(data_dir / "log"),
        # A queue's topics are made on purpose (kmq queue create); a name mistyped must be an error.
        "auto.create.topics.enable": "false",
        # One node: every internal topic has one replica, and few partitions, since each costs files and start-up time.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        # Consumers of a demo or a test start one by one; waiting for more of them costs three seconds each time.
        "group.initial.rebalance.delay.ms": "0",
        # KIP-848 groups: a killed consumer's partitions go to another within seconds (45 by default).
        "group.consumer.min.session.timeout.ms": "6000",
        "group.consumer.session.timeout.ms": "6000",
        "group.consumer.min.heartbeat.interval.ms": "1000",
        "group.consumer.heartbeat.interval.ms": "1000",
        # After kill -9 a broker is refused until its old session has run out: nine seconds by default.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # A laptop: few threads, and a cleaner buffer that fits into the heap (128 MiB by default).
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.threads": "1",
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        # Segments are preallocated in part (index files): small ones, since a demo has many partitions.
        "log.index.size.max.bytes": str(1024 * 1024),
    }
    return "".join(f"{name}={value}\n" for name, value in (settings | dict(extra)).items())


def log_properties(log_file: Path) -> str:
    """
    Return log4j2 settings: warnings and errors, to a file of at most 20 MB.

    Args:
        log_file: File to append to.
    """
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
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""
