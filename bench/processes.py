"""
The processes of a benchmark, their CPU and their memory, read from /proc: on Linux only.

Only this process and its descendants count: other programs on the machine, another Spark too, change nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
HAS_PROC = (_PROC / "self" / "stat").exists()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SPARK = b"org.apache.spark.deploy.SparkSubmit"
_WORKERS = b"pyspark.worker"


class _Stat(NamedTuple):
    parent: int
    own_s: float
    """CPU of the process itself, in user code and in the kernel."""
    children_s: float
    """CPU of its children that have ended, and of theirs."""


def cpu_s(process: int) -> float:
    """Return the CPU of a process and of all that it started, seconds."""
    stats = _stats()
    return sum(stats[each].own_s + stats[each].children_s for each in _family(process, stats))


def cpu_by_class(broker: int) -> dict[str, float]:
    """
    Return the CPU of each class of processes until now, seconds; nothing where there is no /proc.

    `driver` is this process without its children, which are contenders for the most part; `jvm` is Spark's; `workers`
    are PySpark's daemon and what it forks, those that have ended included.
    """
    stats = _stats()
    found = {"broker": 0.0, "driver": 0.0, "jvm": 0.0, "workers": 0.0} if stats else {}
    for process in _family(os.getpid(), stats):
        stat = stats[process]
        if process == broker:
            found["broker"] += stat.own_s + stat.children_s
        elif name := _class_of(process):
            found[name] += stat.own_s + (stat.children_s if name == "workers" else 0)
    return found


def memory_mib() -> dict[str, int]:
    """Return the resident memory of this process, of the Spark JVM and of its Python workers, MiB."""
    found = {"driver_python": 0, "jvm": 0, "workers": 0}
    for process in _family(os.getpid(), _stats()):
        try:
            pages = (_PROC / str(process) / "statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):  # it has ended
            continue
        if name := _class_of(process):
            found["driver_python" if name == "driver" else name] += int(pages) * 4096 // 2**20
    return found


def _stats() -> dict[int, _Stat]:
    """Return what the kernel says of every process."""
    found = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # After the name, which may contain spaces: state, parent, …; 11 to 14 are times in ticks.
            fields = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        found[int(folder.name)] = _Stat(int(fields[1]), own / _TICKS_PER_S, children / _TICKS_PER_S)
    return found


def _family(process: int, stats: dict[int, _Stat]) -> set[int]:
    """Return a process and all that descend from it."""
    found = {process} & stats.keys()
    while more := {each for each, stat in stats.items() if stat.parent in found} - found:
        found |= more
    return found


def _class_of(process: int) -> str:
    """Return the class of one of the processes of a tracker; empty for another, or where it has ended."""
    if process == os.getpid():
        return "driver"
    try:
        command = (_PROC / str(process) / "cmdline").read_bytes()
    except OSError:
        return ""
    if _SPARK in command:
        return "jvm"
    return "workers" if _WORKERS in command else ""
