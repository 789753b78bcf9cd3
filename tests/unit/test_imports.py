"""Importing kmq-spark changes nothing in the process: each module, one after the other, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, importlib, json, logging, os, pkgutil, signal, sys, threading

def state():
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    ours = [each for each in loggers if each.name.split(".")[0] in ("root", "kmq_spark")]
    return {
        "handlers": [(each.name, repr(handler)) for each in ours for handler in each.handlers],
        "levels": [(each.name, each.level) for each in ours if each.level],
        "signals": [repr(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "environment": dict(os.environ),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
        "threads": sorted(each.name for each in threading.enumerate()),
        "hooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "folder": os.getcwd(),
    }

import kmq_spark
names = [each.name for each in pkgutil.walk_packages(kmq_spark.__path__, "kmq_spark.")]
changes, before = [], state()
for name in names:
    importlib.import_module(name)
    after = state()
    changes += [[name, what, repr(before[what]), repr(after[what])] for what in after if after[what] != before[what]]
    before = after
print(json.dumps([len(names), changes]))
"""


def test_importing_every_module_changes_nothing_in_the_process() -> None:
    """Log handlers, signal handlers, environment, garbage collector, threads, hooks and limits are as before."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, changes = json.loads(done.stdout)
    assert count > 150
    assert changes == []


def test_consumer_is_imported_without_what_only_operators_need() -> None:
    """Also few modules of ours: a worker that starts is waited for."""
    code = "import sys; from kmq_spark import QueueConsumer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not {"numpy", "pydantic", "pyspark", "typer", "rich"}.intersection(loaded)
    assert sum(name.split(".")[0] == "kmq_spark" for name in loaded) <= 45
