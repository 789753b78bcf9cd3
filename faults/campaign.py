"""What the whole campaign shares: a broker, the seed, the size, and what it has to end."""

from __future__ import annotations

import json
import threading
import time
import zlib
from typing import TYPE_CHECKING

from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from faults.stage import Judged

BROKER_SETTINGS = {
    # A killed consumer's partitions are free after two seconds: more kills in the same time.
    "group.consumer.min.session.timeout.ms": "2000",
    "group.consumer.session.timeout.ms": "2000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.min.session.timeout.ms": "2000",
    # What a dead process has left open is given up when its time is over, and not up to ten seconds later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}

REFERENCE_S = 0.03
"""What a turn of `Pace` takes on the machine on which the bounds of time were set."""

MOST_SLOW = 3.0
"""A machine that is slower than this has not enough left for the product: its bounds say what is wrong."""

LOOK_EVERY_S = 1.0


class Pace:
    """
    How slow the machine is, looked at every second in a thread, or *fixed*.

    A look takes the processor's time of a fixed piece of work that has nothing of the product in it. It grows with what
    other processes and other guests of the host take from a core.
    """

    def __init__(self, fixed: float | None = None) -> None:
        self._seen = [(time.monotonic(), fixed or _slowness())]
        if fixed is None:
            threading.Thread(target=self._look, name="kmq-pace", daemon=True).start()

    def since(self, began_s: float) -> float:
        """Return how many times slower than the reference it was on average since an instant of `time.monotonic`."""
        seen = [slowness for at_s, slowness in self._seen if at_s >= began_s] or [self._seen[-1][1]]
        return round(min(max(sum(seen) / len(seen), 1.0), MOST_SLOW), 2)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            self._seen.append((time.monotonic(), _slowness()))


class Campaign:
    """
    One run of the campaign.

    *scale* is the share of the full number of injections: 0 for one of each kind under a third of the load. *patience*
    is a factor of every time limit; by default it is how slow the machine is at that time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        scale: float = 1.0,
        broker: EmbeddedBroker | None = None,
        broker_environment: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> None:
        self.folder, self.seed, self.scale, self.pace = folder, seed, scale, Pace(patience)
        self.broker_environment = dict(broker_environment or {})
        self._owns_broker = broker is None
        self.broker = broker or self.new_broker()
        self.stages: list[Judged] = []

    def new_broker(
        self, extra: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
    ) -> EmbeddedBroker:
        """Start a broker, with more settings and environment variables."""
        settings, variables = {**BROKER_SETTINGS, **(extra or {})}, {**self.broker_environment, **(environment or {})}
        return EmbeddedBroker(extra=settings, environment=variables).start()

    def times(self, count: int, least: int = 1) -> int:
        """Return how many of *count* injections this run makes."""
        return max(least, round(count * self.scale))

    def rate(self, most: int) -> int:
        """Return at how many messages a second a fault sends: a third of *most* at the smallest scale."""
        return most if self.scale else most // 3

    def end_stages(self) -> None:
        """End what a fault has left running, so that the next one has the machine; the broker runs on."""
        # A scenario that broke off may have left the broker suspended or dead.
        self.broker.resume()
        self.broker.start()
        while self.stages:
            self.stages.pop().close()

    def close(self) -> None:
        """End everything that was started here."""
        self.end_stages()
        if self._owns_broker:
            self.broker.close()


def _slowness() -> float:
    began_s = time.thread_time()
    for number in range(40):
        markers = [{"partition": number, "offset": offset, "type": "START"} for offset in range(300)]
        text = zlib.decompress(zlib.compress(json.dumps(markers).encode()))
        sum(offset * offset for offset in sorted((marker["offset"] for marker in json.loads(text)), reverse=True))
    return (time.thread_time() - began_s) / REFERENCE_S
