"""
Run one child process, and end it when our parent ends, whatever ends the parent.

Rule 1: standard library alone, and run as a file (`python -I -S supervisor.py`): it must start in milliseconds.
Rule 2: three ways to notice, since each has a gap: the pipe from the parent closes (a forked child of the parent may
    keep it open), the parent's process id changes (seen within 0.2 s), and on Linux the kernel kills the child should
    this process itself be killed.
Rule 3: the child is killed, not asked: a paused process does not answer, and Kafka's log is made for it.

Arguments: a directory to remove when the parent dies (empty for none), then the command.
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
    """
    Start the command and wait until it or the parent ends.

    Returns:
        Exit code of the child as a shell would give it: 128 + n when signal n ended it.
    """
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_supervisor() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # PDEATHSIG follows the thread that forked: this process has no other, so preexec_fn is safe too.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_supervisor)  # noqa: PLW1509
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    while child.poll() is None:
        # Nothing is ever written to the pipe: readable means closed.
        closed, _, _ = select.select([sys.stdin], [], [], _POLL_INTERVAL_S)
        if closed or os.getppid() != parent:
            child.kill()
            child.wait()
            if remove_directory:
                shutil.rmtree(remove_directory, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
