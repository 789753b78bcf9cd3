"""
Run one child process, and kill it when the parent of this process ends for any reason.

Rule 1: only the standard library, and run as a file (`python -I -S supervisor.py`), so that it starts in milliseconds.
Rule 2: the end of the parent is detected in two ways. The pipe from the parent closes, unless a forked child of the
    parent keeps it open. The parent process id changes, which is noticed within 0.2 s. If this process itself is
    killed, the Linux kernel kills the child.
Rule 3: the child is killed, not terminated: a paused process does not react to SIGTERM, and Kafka's log survives a
    kill.

Arguments: a directory to remove when the parent ends (empty for none), then the command.
Standard input: the pipe from the parent. Standard output: one line, the child's process id.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_POLL_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(remove_directory: str, command: list[str]) -> int:
    """Start the command and wait until it or the parent ends; return the exit code of the child as in a shell."""
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_supervisor() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # PDEATHSIG is sent when the forking thread ends. This process has a single thread, so preexec_fn is safe too.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_supervisor)  # noqa: PLW1509
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    while child.poll() is None:
        # The parent never writes to the pipe, so readable means closed.
        closed, _, _ = select.select([sys.stdin], [], [], _POLL_INTERVAL_S)
        if closed or os.getppid() != parent:
            child.kill()
            child.wait()
            if remove_directory:
                shutil.rmtree(remove_directory, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
