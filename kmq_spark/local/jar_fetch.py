"""
Run Ivy in a separate process, show its progress, and report a failure in one line.

Rule 1: Ivy's output is written to a log file; the terminal shows one progress line.
Rule 2: the caller must verify the fetched files; this module does not check them.
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
"""A fetch is aborted after this time without new bytes; Ivy itself would wait for minutes for each jar."""

_STALLED = f"kmq: given up, no byte came for {STALL_LIMIT_S:.0f} s"

_NEEDED_BYTES = 10_000_000
"""If less disk space is free after a failure, the full disk is reported as the cause."""

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
        coordinates: Coordinates `group:artifact:version`; dependencies are not added.
        into: Directory for Ivy's files; created if it is missing.
        log: File for the output of Ivy and its JVM.
        title: Word for the progress line, such as `broker`.

    Returns:
        The directory that contains the jars, named `<group>_<artifact>-<version>.jar`.

    Raises:
        SetupError: Java or pyspark is missing, the network or the disk failed, or a coordinate does not exist.
    """
    java_home = find_java().parent.parent
    jars = into / "jars"
    # First try an empty home directory: a Maven cache with a pom but without its jar makes Ivy fail. Then try the
    # user's home, because without a network its Maven cache may be the only source.
    homes = [Path(tempfile.mkdtemp(dir=_made(into), prefix="home-"))]
    homes += [Path.home()] if Path.home().joinpath(".m2", "repository").is_dir() else []
    for home in homes:
        ivy = _start(_command(into, coordinates), _environment(java_home, home), log)
        if _wait(ivy, into, title=f"{title} jars", total=len(coordinates)):
            return jars
        if ivy.returncode == -signal.SIGKILL:  # `_wait` killed it after a stall
            with log.open("a") as out:
                out.write(f"{_STALLED}\n")
    raise SetupError(_failure(title, log, free_bytes=shutil.disk_usage(into).free))


def _made(directory: Path) -> Path:
    """Create a directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _command(into: Path, coordinates: Sequence[str]) -> list[str]:
    """Return the command line of the Ivy process."""
    return [sys.executable, "-m", "kmq_spark.local.ivy", str(into), ",".join(coordinates)]


def _environment(java_home: Path, home: Path) -> dict[str, str]:
    """Return this environment without variables that would select another Spark or load the user's packages."""
    unwanted = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "SPARK_REMOTE"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    arguments = f"--driver-java-options '-Duser.home={home}' pyspark-shell"
    return kept | {
        "JAVA_HOME": str(java_home),
        "PYSPARK_SUBMIT_ARGS": arguments,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Spark resolves its host name at start, which takes half a minute if no name server answers.
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def _start(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start Ivy with its output in the log file."""
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)


def _wait(ivy: subprocess.Popen[bytes], directory: Path, *, title: str, total: int) -> bool:
    """Wait until Ivy ends or stalls; return whether it succeeded."""
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
    """Rewrite the progress line, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def _failure(title: str, log: Path, *, free_bytes: int) -> str:
    """Return one line that says why Ivy failed and what to do."""
    said = log.read_text(errors="replace")
    what = f"cannot fetch the {title} jars"
    if "No module named 'pyspark'" in said:
        return f"{what}: pyspark is not installed; run pip install 'kmq-spark[spark]'"
    # On a full disk Ivy may hang without an error message.
    if free_bytes < _NEEDED_BYTES or "No space left on device" in said:
        return f"{what}: no space left on device; free 300 MB or set KMQ_JARS_DIR to another disk"
    if _STALLED in said or any(sign in said for sign in _NETWORK_SIGNS):
        return (
            f"{what}: the repository cannot be reached (log: {log}); "
            "check the network, or copy the jar cache of another machine and set KMQ_JARS_DIR to it"
        )
    return f"{what}: Ivy failed; see {log}"
