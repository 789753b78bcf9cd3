"""Brokers of tests: they use less of the processor than others, and are as correct."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
"""
Environment of every broker that tests start: Java's first compiler only. Within a test none earns back what the second
one takes. Java says in the broker's `console.log` that it has read the variable.
"""


def quick_broker(
    data_dir: Path | None = None, port: int | None = None, extra: Mapping[str, str] | None = None
) -> EmbeddedBroker:
    """Return an embedded broker with `QUICK_JAVA`, not started; see `EmbeddedBroker` for the arguments."""
    return EmbeddedBroker(data_dir, port, extra, environment=QUICK_JAVA)
