"""
Inspect the tracker's checkpoint folder for commands.

Rule 1: read only; folders that are not on this machine are not inspected.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from kmq_spark.inspection.facts import CheckpointFacts


def look_at_checkpoint(checkpoint_dir: str, queue: str) -> CheckpointFacts | None:
    """
    Inspect a checkpoint folder.

    Args:
        checkpoint_dir: As in `[tracker] checkpoint_dir`: a path, or the URL of a file system of the cluster.
        queue: Queue of the tracker.

    Returns:
        The facts; None if the folder does not exist on this machine, since the tracker may run elsewhere.
    """
    address = f"{checkpoint_dir.rstrip('/')}/{queue}"
    scheme = urlsplit(checkpoint_dir).scheme
    if scheme not in {"", "file"}:
        return CheckpointFacts(address, is_local=False)
    folder = Path(urlsplit(address).path if scheme else address)
    try:
        if not folder.exists():
            return None
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return CheckpointFacts(address, "no folder that this user may read and write")
        commits = folder / "commits"
        names = [int(each.name) for each in commits.iterdir() if each.name.isdigit()] if commits.is_dir() else []
        if not names:
            return CheckpointFacts(address)
        return CheckpointFacts(address, last_batch_at_ms=int((commits / str(max(names))).stat().st_mtime * 1000))
    except OSError as error:
        return CheckpointFacts(address, error.strerror or "cannot be read")
