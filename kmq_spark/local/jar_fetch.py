"""
Run Ivy in a process of its own, show its progress, and say in one line what went wrong.

Rule 1: Ivy's own talk goes to a log file; the terminal gets one line of progress.
Rule 2: the caller verifies what came: nothing in here is trusted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kmq_spark.errors import SetupError
from kmq_spark.local.java import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STALL_LIMIT_S = 30.0
"""Without a byte for so long, a fetch is given up: Ivy alone would wait for minutes, jar by jar."""

_STALLED = f"kmq: given up, no byte came for {STALL_LIMIT_S:.0f} s"

_NEEDED_BYTES = 10_000_000
"""With less left after a failure, the disk is why."""

_POLL_INTERVAL_S = 0.2

_NETWORK_SIGNS = (
    "not found. url=",  # Ivy's "Host … not found. url=…"
    "UnknownHostException",
    "ConnectException",
    "NoRouteToHost",
    "SocketTimeoutException",
    "SocketException",
    "SSLHandshakeException",
    "Server access error",
)


def fetch_with_ivy(coordinates: Sequence[str], into: Path, *, log: Path, title: str) -> Path:
    """
    Fetch exactly these coordinates.

    Args:
        coordinates: `group:artifact:version` each, no dependencies are added.
        into: Directory for Ivy's files, made when missing.
        log: File that receives everything Ivy and its JVM say.
        title: Word for the line of progress, such as `broker`.

    Returns:
        The directory that holds the jars, named `<group>_<artifact>-<version>.jar`.

    Raises:
        SetupError: Java or pyspark is missing, the network or the disk failed, or a coordinate does not exist.
    """
    java_home = find_java().parent.parent
    jars = into / "jars"
    # A home of its own first: a Maven cache that holds a pom without its jar stops Ivy. Then the user's, whose Maven
    # cache may be all there is without a network.
    homes = [Path(tempfile.mkdtemp(dir=_made(into), prefix="home-"))]
    homes += [Path.home()] if Path.home().joinpath(".m2", "repository").is_dir() else []
    for home in homes:
        ivy = _start(_command(into, coordinates), _environment(java_home, home), log)
        if _wait(ivy, into, title=f"{title} jars", total=len(coordinates)):
            return jars
        if ivy.returncode == -signal.SIGKILL:  # by us, after a stall
            with log.open("a") as out:
                out.write(f"{_STALLED}\n")
    raise SetupError(_failure(title, log, free_bytes=shutil.disk_usage(into).free))


def _made(directory: Path) -> Path:
    """Make a directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _command(into: Path, coordinates: Sequence[str]) -> list[str]:
    """Return the command line of the Ivy process."""
    return [sys.executable, "-m", "kmq_spark.local.ivy", str(into), ",".join(coordinates)]


def _environment(java_home: Path, home: Path) -> dict[str, str]:
    """Return our environment without what would start another Spark, or this one with the user's packages."""
    unwanted = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "SPARK_REMOTE"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    arguments = f"--driver-java-options '-Duser.home={home}' pyspark-shell"
    return kept | {
        "JAVA_HOME": str(java_home),
        "PYSPARK_SUBMIT_ARGS": arguments,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Spark looks up its own host name at start, which takes half a minute where no name server answers.
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def _start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start Ivy with everything it says in the log file."""
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)


def _wait(ivy: subprocess.Popen[bytes], directory: Path, *, title: str, total: int) -> bool:
    """Wait until Ivy ends, or until nothing has moved for too long; tell whether it did well."""
    try:
        for fetched in _watch(ivy, directory):
            _show(f"kmq: fetching {title}: {fetched} of {total}")
        return ivy.poll() == 0
    finally:
        if ivy.poll() is None:
            ivy.kill()
        ivy.wait()
        _show("")


def _watch(ivy: subprocess.Popen[bytes], directory: Path) -> Iterator[int]:
    """Yield the number of jars so far until the process ends or stalls."""
    seen, moved_at = -1, time.monotonic()
    while ivy.poll() is None and time.monotonic() - moved_at < STALL_LIMIT_S:
        files = [Path(parent, name) for parent, _, names in os.walk(directory) for name in names]
        size = sum(file.stat().st_size for file in files if file.exists())
        if size != seen:
            seen, moved_at = size, time.monotonic()
        yield sum(file.suffix == ".jar" and "cache" in file.parts for file in files)
        time.sleep(_POLL_INTERVAL_S)


def _show(line: str) -> None:
    """Rewrite the line of progress, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def _failure(title: str, log: Path, *, free_bytes: int) -> str:
    """Return the one line that tells why Ivy failed and what to do."""
    said = log.read_text(errors="replace")
    what = f"cannot fetch the {title} jars"
    if "No module named 'pyspark'" in said:
        return f"{what}: pyspark is not installed; run pip install 'kmq-spark[spark]'"
    # On a full disk Ivy may hang without a word.
    if free_bytes < _NEEDED_BYTES or "No space left on device" in said:
        return f"{what}: no space left on device; free 300 MB or set KMQ_JARS_DIR to another disk"
    if _STALLED in said or any(sign in said for sign in _NETWORK_SIGNS):
        return (
            f"{what}: the repository cannot be reached (log: {log}); "
            "check the network, or copy the jar cache of another machine and set KMQ_JARS_DIR to it"
        )
    return f"{what}: Ivy failed; see {log}"
