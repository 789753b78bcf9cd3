"""
Brokers of tests: they use less of the processor than others, and are as correct.

Rule 1: Java's first compiler only. Within a test none earns back what the second one takes.
Rule 2: a broker takes its classes from an archive (AppCDS), which the first test that starts one writes into the cache.
Its name contains a digest of the installed Java and of the jars, and Java itself ignores one that does not fit.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, Producer

from kmq_spark.kafka.topics import create_queue_topics
from kmq_spark.local.broker import EmbeddedBroker
from kmq_spark.local.jars import cache_folder, exclusive, jar_paths
from kmq_spark.local.java import find_java
from tests.kafka.conftest import wait_until
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Mapping

QUIET = "-Xlog:cds*=off -Xlog:class+path=off"
"""Otherwise Java prints on stdout that an archive does not fit."""

_OPTIONS = "JDK_JAVA_OPTIONS"
_FIRST_COMPILER = "-XX:TieredStopAtLevel=1"


def quick_broker(data_dir: Path | None = None, extra: Mapping[str, str] | None = None) -> EmbeddedBroker:
    """Return an embedded broker with `quick_java`, not started; see `EmbeddedBroker` for the arguments."""
    return EmbeddedBroker(data_dir, extra=extra, environment=quick_java())


@functools.cache
def quick_java() -> dict[str, str]:
    """
    Return the environment of every broker that tests start; the first call on a machine takes about 20 seconds.

    Java says in the broker's `console.log` that it has read the variable.
    """
    java = find_java()
    used = [java.resolve().parents[1] / "lib" / "modules", *jar_paths("broker")]
    facts = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in used]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    archive = cache_folder() / "classes" / f"broker-of-tests-{digest}.jsa"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(archive.with_suffix(".lock")):
        if not archive.exists():
            _write_archive(archive)
    return {_OPTIONS: f"{_FIRST_COMPILER} -XX:SharedArchiveFile={archive} {QUIET}"}


def _write_archive(archive: Path) -> None:
    """Run a broker that does what tests make brokers do; Java archives the classes as it ends."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        written = Path(folder, "classes.jsa")
        environment = {_OPTIONS: f"{_FIRST_COMPILER} -XX:ArchiveClassesAtExit={written} {QUIET}"}
        with EmbeddedBroker(environment=environment) as broker:
            _use(broker.bootstrap_servers)
            # Not `stop`, which kills a broker that does not end soon enough: half an archive would crash Java.
            os.kill(broker.pid, signal.SIGTERM)
            assert wait_until(lambda: not broker.is_running, ENDS_S)
        written.rename(archive)


def end_clients() -> None:
    """End clients in the frames of caught errors before their broker ends: they would say on stderr that it is away."""
    gc.unfreeze()  # `tracker.fold_rows` froze what was there
    gc.collect()


def _use(bootstrap_servers: str) -> None:
    """Create a queue, write to it in a transaction, and read it as a member of a group."""
    create_queue_topics("q", bootstrap_servers=bootstrap_servers, partitions=1)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "transactional.id": "t"})
    producer.init_transactions(ENDS_S)
    producer.begin_transaction()
    producer.produce("q", b"message")
    producer.commit_transaction(ENDS_S)
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe(["q"])
    assert consumer.poll(ENDS_S) is not None
    consumer.commit(asynchronous=False)
    consumer.close()
