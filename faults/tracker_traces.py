"""What trackers leave behind: their logs, their checkpoints, and the status that each reported last."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from faults.conservation import ReportedStatus, Status
from faults.leases import Session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kmq_spark.core.state import Status as TrackerStatus

_OPENED = re.compile(r"tracker (\S+) of (\S+) started; decides from marker offsets (\{.*\})")


def sessions(folder: Path, queue: str) -> list[Session]:
    """
    Return the trackers that took over a queue, in their order, from what they logged.

    Args:
        folder: With the trackers' logs, `tracker*.log`.
        queue: Name.
    """
    found = [
        Session(match[1], {int(partition): int(at) for partition, at in json.loads(match[3]).items()})
        for log in sorted(folder.glob("tracker*.log"))
        for match in _OPENED.finditer(log.read_text(errors="replace"))
        if match[2] == queue
    ]
    # The end of a log only grows; a tracker's own clock may be wrong on purpose.
    return sorted(found, key=lambda session: sum(session.decides_from.values()))


def reported(checkpoint: Path, queue: str, statuses: Mapping[int, TrackerStatus]) -> dict[int, ReportedStatus]:
    """
    Return what a tracker reported, by markers partition.

    Args:
        checkpoint: Folder of the tracker's checkpoints.
        queue: Name.
        statuses: Last status that it reported, by markers partition.
    """
    begins_at = _begins_at(checkpoint / queue)
    return {
        partition: ReportedStatus(begins_at.get(partition, 0), Status.of(status.to_dict()))
        for partition, status in statuses.items()
    }


def checkpoint_mib(folder: Path) -> int:
    """Return the size of the largest checkpoint below a stage's folder, MiB."""
    folders = [each for each in folder.glob("*/*") if (each / "offsets").is_dir()]
    sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in folders]
    return max(sizes, default=0) // 2**20


def _begins_at(checkpoint: Path) -> dict[int, int]:
    """Return from which marker offsets the state in a checkpoint was built, as Spark's Kafka source noted it."""
    file = checkpoint / "sources" / "0" / "0"
    if not file.exists():
        return {}
    noted = file.read_bytes()  # a zero byte, a version, JSON
    (offsets,) = json.loads(noted[noted.index(b"{") :]).values()
    return {int(partition): int(offset) for partition, offset in offsets.items()}
