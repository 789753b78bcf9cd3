"""Processes that fork while they are a member and consume: a child is not a member, and ends as it does elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kmq_spark.coordination import Consumption
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from tests.kafka.coordination.conftest import Make

pytestmark = pytest.mark.kafka

FORKS = """
import gc, os, sys
from kmq_spark.coordination import Consumption, Coordinator
from kmq_spark.errors import UsageError

servers, topic, clicks = sys.argv[1:]

def child(what, batches, batch):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if what == "exits":
        sys.exit(3)
    if what == "continues":
        try:
            next(iter(batches))
        except UsageError:
            batch.claim.release()
            sys.exit(0 if not batch.claim.is_held else 5)
    return None

def run():
    parent, codes = os.getpid(), []
    with Coordinator(clicks, bootstrap_servers=servers, topic=topic, heartbeat=5) as member:
        with Consumption(member, clicks) as batches:
            batch = next(iter(batches))
            for what in ("exits", "continues", "leaves the blocks"):
                codes.append(child(what, batches, batch))
                if os.getpid() != parent:
                    break
            else:
                batch.check()
    return codes if os.getpid() == parent else None

codes = run()
gc.collect()
if codes is None:
    sys.exit(4)
print(codes)
"""


def test_children_of_a_member_that_consumes_end_as_they_do_elsewhere(
    bootstrap_servers: str, topic: str, make: Make
) -> None:
    """They exit, get an error for the next batch, or leave the blocks; the parent holds its claim and consumes on."""
    clicks = f"forks-{time.time_ns()}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    admin.create_topics([NewTopic(clicks, 1, 1)])[clicks].result()
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(clicks, b"0")
    assert producer.flush(COMES_S) == 0
    command = [sys.executable, "-c", FORKS, bootstrap_servers, topic, clicks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert (done.returncode, done.stdout) == (0, "[3, 0, 4]\n"), done.stderr
    with Consumption(make("b", group=clicks), clicks, idle=1) as batches:
        assert list(batches) == []
