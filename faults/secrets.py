"""
A secret in the settings of every client of the campaign, and where it turns up (I14).

Rule 1: no client needs it, since the broker asks for none; each has it among its settings as one that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.evidence import FACTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CANARY = "canary-7f3a9c51"

SECRET = {"sasl.password": CANARY}
"""Settings of librdkafka."""

JAVA_SECRET = {"ssl.key.password": CANARY}
"""Settings of Kafka's Java client."""


def leaking(folder: Path) -> Iterator[str]:
    """Yield the files of a stage that hold the secret: logs, events, checkpoints, a ledger."""
    for file in sorted(folder.rglob("*")):
        # The facts have the workers' profiles, settings included.
        if file.is_file() and file.name != FACTS and CANARY.encode() in file.read_bytes():
            yield str(file.relative_to(folder))
