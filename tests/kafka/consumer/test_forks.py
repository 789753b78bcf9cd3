"""Handlers that fork: a child is not a worker, and signals and exits do in it what they do elsewhere."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.kafka.conftest import ended
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from tests.kafka.conftest import Queue

pytestmark = pytest.mark.kafka

FORKS = """
import multiprocessing, os, sys, time
from kmq_spark import QueueConsumer

fork = multiprocessing.get_context("fork")

def child(what):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if what == "exits":
        sys.exit(3)
    if what == "raises":
        raise ValueError("of the child")

def handle(message):
    parent = os.getpid()
    codes = []
    for what in ("exits", "raises", "returns"):
        codes.append(child(what))
        if os.getpid() != parent:
            return
    ends = set()
    for _ in range(30):
        sleeper = fork.Process(target=time.sleep, args=(60,))
        sleeper.start()
        sleeper.terminate()  # at once: a signal that comes while the child is made counts too
        sleeper.join()
        ends.add(sleeper.exitcode)
    with fork.Pool(2) as pool:
        squares = pool.map(abs, range(-3, 0))
    print(codes, ends, squares, flush=True)
    consumer.stop()

consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2])
print(consumer.run(handle, concurrency=4).acked)
"""


def test_children_that_a_handler_forks_end_as_they_do_elsewhere(queue: Queue) -> None:
    queue.send("a")
    command = [sys.executable, "-c", FORKS, queue.name, queue.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert (done.returncode, done.stdout) == (0, "[3, 1, 0] {-15} [3, 2, 1]\n1\n"), done.stderr
    assert "ValueError: of the child" in done.stderr
    assert ended(queue) == [0]


COROUTINES = """
import multiprocessing, sys, time
from kmq_spark import QueueConsumer

fork = multiprocessing.get_context("fork")

async def handle(message):
    sleeper = fork.Process(target=time.sleep, args=(60,))
    sleeper.start()
    sleeper.terminate()
    sleeper.join()
    print(message.value, sleeper.exitcode, flush=True)
    if message.value == b"c":
        consumer.stop()

consumer = QueueConsumer(sys.argv[1], bootstrap_servers=sys.argv[2])
print(consumer.run(handle, concurrency=1).acked)
"""


def test_child_of_a_coroutine_does_not_stop_the_run_of_its_parent_when_it_is_terminated(queue: Queue) -> None:
    queue.send("a", "b", "c")
    command = [sys.executable, "-c", COROUTINES, queue.name, queue.bootstrap_servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
    assert (done.returncode, done.stdout) == (0, "b'a' -15\nb'b' -15\nb'c' -15\n3\n"), done.stderr
