"""
Find a Java that can run both Spark and Kafka.

Rule 1: check `JAVA_HOME` first, then `PATH`; use the first Java that is new enough.
Rule 2: only the standard library, so that a setup script can use this module before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from kmq_spark.errors import SetupError

MINIMUM_JAVA = 17
"""Spark 4 and Kafka 4 brokers need this version."""

_VERSION_TIMEOUT_S = 30


def find_java() -> Path:
    """Return the path of a `java` of version 17 or newer; `JAVA_HOME` takes precedence over `PATH`."""
    found: list[str] = []
    for candidate in _candidates():
        version = java_version(candidate)
        if version is not None and version >= MINIMUM_JAVA:
            return candidate.resolve()
        found.append(f"{candidate} is {'no Java' if version is None else f'version {version}'}")
    got = "; ".join(found) if found else "none in JAVA_HOME or PATH"
    message = (
        f"Java {MINIMUM_JAVA} or newer is needed: got {got}; install OpenJDK {MINIMUM_JAVA} or set JAVA_HOME to one"
    )
    raise SetupError(message)


def collector() -> list[str]:
    """Return the option for the garbage collector with the fewest threads; nothing if the user has chosen one."""
    names = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    others = [os.environ.get(name, "") for name in names]
    if folder := os.environ.get("SPARK_CONF_DIR"):
        with contextlib.suppress(OSError):
            others.append(Path(folder, "spark-defaults.conf").read_text("utf-8", "replace"))
    return [] if re.search(r"-XX:\+Use\w+GC", " ".join(others)) else ["-XX:+UseSerialGC"]


def java_version(java: Path) -> int | None:
    """Return the feature version of a `java` program, such as 17 (8 for `1.8`); None if it says none."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if match and done.returncode == 0 else None


def _candidates() -> list[Path]:
    """Return the existing `java` programs, in order of precedence."""
    named = [Path(home, "bin", "java")] if (home := os.environ.get("JAVA_HOME")) else []
    on_path = shutil.which("java")
    both = named + ([Path(on_path)] if on_path else [])
    return [java for java in both if java.is_file()]
