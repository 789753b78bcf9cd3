"""A process that forks while it has our clients open: its child ends as it does elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kmq_spark.coordination import create_coordination_topic
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

FORKS = """
import json, os, sys
from kmq_spark import QueueConsumer, QueueProducer, ResumingProducer
from kmq_spark.coordination import Coordinator

queue, servers = sys.argv[1:]

def consumer():
    consumer = QueueConsumer(queue, bootstrap_servers=servers)
    (message,) = consumer.receive(1, timeout=30)
    with consumer.transaction() as tx:
        tx.ack(message)
    return consumer

def producer():
    producer = QueueProducer(queue, bootstrap_servers=servers)
    producer.send("sent")
    return producer

def resuming_producer():
    producer = ResumingProducer(queue, "files", bootstrap_servers=servers)
    producer.send("sent")
    producer.commit("1")
    return producer

def member():
    member = Coordinator(queue, bootstrap_servers=servers, topic=f"{queue}.coordination")
    member.join()
    return member

codes = {}
for made in (consumer, producer, resuming_producer, member):
    client = made()
    pid = os.fork()
    if not pid:
        sys.exit(3)
    codes[made.__name__] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.close()
print(json.dumps(codes))
"""


def test_child_that_exits_beside_an_open_client_is_not_ended_by_a_signal(queue: Queue) -> None:
    """SIGSEGV where the child destroyed a client, whose threads only its parent has. The parent goes on."""
    create_coordination_topic(queue.bootstrap_servers, topic=f"{queue.name}.coordination", replication_factor=1)
    queue.send("received")
    command = [sys.executable, "-c", FORKS, queue.name, queue.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"consumer": 3, "producer": 3, "resuming_producer": 3, "member": 3}
