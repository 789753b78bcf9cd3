"""Spark clusters for tests: a standalone master, two workers, an administrator's defaults, a bare interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark

from tests.limits import COMES_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PYSPARK = Path(pyspark.__file__).parent
WORK_FOLDERS = ("work-0", "work-1")

DEFAULTS = """\
spark.api.mode connect
spark.submit.deployMode cluster
spark.driver.defaultJavaOptions -Djava.io.tmpdir={temporary}
spark.driver.extraJavaOptions -XX:+UseParallelGC
spark.executor.extraJavaOptions -XX:+UseParallelGC -Djava.io.tmpdir={temporary}
spark.hadoop.fs.defaultFS viewfs://cluster/
spark.hadoop.fs.viewfs.mounttable.cluster.link./checkpoints file://{folder}/checkpoints
spark.io.encryption.enabled true
spark.python.unix.domain.socket.enabled true
spark.redaction.regex (?i)pin
spark.serializer org.apache.spark.serializer.KryoSerializer
spark.speculation true
spark.sql.ansi.enabled false
spark.sql.caseSensitive true
spark.sql.execution.arrow.maxBytesPerBatch 1
spark.sql.execution.arrow.maxRecordsPerBatch 1
spark.sql.execution.arrow.useLargeVarTypes true
spark.sql.execution.pyspark.binaryAsBytes false
spark.sql.session.timeZone Asia/Kathmandu
spark.sql.shuffle.partitions 7
spark.sql.streaming.minBatchesToRetain 2
spark.sql.streaming.stateStore.minDeltasForSnapshot 1000
spark.sql.streaming.stateStore.providerClass \
    org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider
spark.sql.timestampType TIMESTAMP_NTZ
"""
"""What an administrator may have set for every job of a cluster. `viewfs` is a file system that is not local."""


def spark_home(folder: Path) -> Path:
    """Return a Spark of links to the installed one, so that what is written beside it stays in the test's folder."""
    home = folder / "spark"
    home.mkdir()
    for part in ("bin", "jars", "python"):
        if (PYSPARK / part).exists():
            (home / part).symlink_to(PYSPARK / part)
    return home


def plain_interpreter(folder: Path) -> Path:
    """
    Return an interpreter that has every dependency and not this package: what an executor finds on another machine.

    It reads no `.pth` file, so an editable installation is not seen, and the checkout is taken out of `PYTHONPATH`.
    """
    program = folder / "executor-python"
    program.write_text(
        "#!/bin/sh\n"
        f"paths=$(printf %s \"${{PYTHONPATH:-}}\" | tr : '\\n' | grep -vxF '{ROOT}' | tr '\\n' ':')\n"
        f'PYTHONPATH="$paths{PYSPARK.parent}" exec \'{sys.executable}\' -S "$@"\n'
    )
    program.chmod(0o755)
    return program


def cluster_environment(home: Path) -> dict[str, str]:
    """Return the environment of everything in a cluster: loopback, small, and no checkout on its path."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "SPARK_CONF_DIR"}}
    return {
        **kept,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false -Dspark.ui.enabled=false",
    }


def hostile_defaults(folder: Path) -> Path:
    """Return a folder of a `spark-defaults.conf` that sets what an administrator may set, and what we set in code."""
    (temporary := folder / ("t" * 120)).mkdir()
    (conf := folder / "conf").mkdir()
    (conf / "spark-defaults.conf").write_text(DEFAULTS.format(folder=folder, temporary=temporary))
    return conf


@contextmanager
def standalone_cluster(folder: Path, home: Path) -> Iterator[str]:
    """Run a master and two workers of one core, on free ports; give the master's address."""
    with ExitStack() as running:
        log = running.enter_context(_daemon(folder / "master.log", home, "master.Master", "--port", "0"))
        address = _wait_for(log, r"Starting Spark master at (spark://\S+)")
        _wait_for(log, r"I have been elected leader()")
        options = ("worker.Worker", "--cores", "1", "--memory", "1g", "--work-dir")
        logs = [
            running.enter_context(_daemon(folder / f"{work}.log", home, *options, str(folder / work), address))
            for work in WORK_FOLDERS
        ]
        for each in logs:
            _wait_for(each, r"Successfully registered()")
        yield address


@contextmanager
def _daemon(log: Path, home: Path, name: str, *arguments: str) -> Iterator[Path]:
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--webui-port", "0", *arguments],
            stdout=output,
            stderr=output,
            env=cluster_environment(home),
        )
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, pattern: str) -> str:
    """Return what a line of a log says, once it is there."""
    until = time.monotonic() + COMES_S
    while time.monotonic() < until:
        if found := re.search(pattern, log.read_text()):
            return found[1]
        time.sleep(0.1)
    message = f"{pattern} did not come in {COMES_S:g} s: {log.read_text()[-2000:]}"
    raise AssertionError(message)
