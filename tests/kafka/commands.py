"""Commands as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def start(bootstrap_servers: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command as a process of its own, which ends with its test."""
    command = [sys.executable, "-m", "kmq_spark.cli.main", *arguments, "--bootstrap-server", bootstrap_servers]
    _started.append(subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}))
    return _started[-1]


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """Kill what a test that failed has left."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()
