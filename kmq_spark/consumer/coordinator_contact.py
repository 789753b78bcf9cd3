"""
Notice when a client has been without its group coordinator for long.

librdkafka 2.16 removes a broker that is missing in the metadata. The metadata lists no broker at all if the only broker
was suspended and has just resumed. The client then removes its only broker, and sometimes never connects again. A new
client connects at once.

Source: librdkafka STATISTICS.md for the fields; `rd_kafka_broker_decommission` for the fault.
"""

from __future__ import annotations

import json

LOST_S = 30.0
"""Longest time without a coordinator. A client that can find it does so within `reconnect.backoff.max.ms` (10 s)."""

STATISTICS_MS = 5_000
"""Interval at which the client reports its state, `statistics.interval.ms`."""


class CoordinatorContact:
    """
    Follow the statistics of a client.

    Attributes:
        is_lost: Whether the client has had no coordinator for `LOST_S`, by its own clock.
    """

    def __init__(self) -> None:
        """Begin before the first statistics."""
        self._away_since_us: int | None = None
        self.is_lost = False

    def observe(self, statistics: str) -> None:
        """Take time and state of the consumer group from the client's statistics, a JSON object."""
        report = json.loads(statistics)
        now_us: int = report["ts"]
        if report.get("cgrp", {}).get("state") == "up":
            self._away_since_us = None
        elif self._away_since_us is None:
            self._away_since_us = now_us
        self.is_lost = self._away_since_us is not None and now_us - self._away_since_us >= LOST_S * 1e6
