"""What the whole campaign shares: a broker, a Spark session where one is asked for, the seed and the size."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from faults.stage import BROKER_SETTINGS, Stage
from kmq_spark.local.broker import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from faults.judged_stage import JudgedStage
    from faults.on_coordination import GroupStage
    from faults.on_producers import CopyStage
    from faults.on_sinks import SinkStage

Group = TypeVar("Group", bound="GroupStage")
Value = TypeVar("Value")


class Campaign:
    """
    One run of the campaign.

    Args:
        folder: Logs, events, checkpoints.
        seed: Seed of everything that is chosen.
        scale: Share of the full number of injections, in each fault; at 0 one of each kind, under a third of the load.
        broker: A running one; one of its own by default.
        broker_environment: Environment variables of each broker that a fault starts.
        spark: Returns a running session; one of its own by default.
        patience: Factor of every time limit and of every bound of a wait; more than 1 on a slow or loaded machine.
        evidence: Folder in which each stage leaves what its verdict was made from; None for none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        scale: float = 1.0,
        broker: EmbeddedBroker | None = None,
        broker_environment: Mapping[str, str] | None = None,
        spark: Callable[[], SparkSession] | None = None,
        patience: float = 1.0,
        evidence: Path | None = None,
    ) -> None:
        """Start nothing yet but the broker."""
        self.folder = folder
        self.seed = seed
        self.scale = scale
        self.patience = patience
        self.evidence = evidence
        self._owns_broker = broker is None
        self.broker_environment = dict(broker_environment or {})
        self.broker = broker or self.new_broker(BROKER_SETTINGS)
        self._shared_spark = spark
        self._own_spark: SparkSession | None = None
        self._stages: list[JudgedStage] = []

    def new_broker(self, extra: Mapping[str, str], environment: Mapping[str, str] | None = None) -> EmbeddedBroker:
        """Start a broker for a fault that needs one of its own: settings, and more environment variables."""
        return EmbeddedBroker(extra=extra, environment={**self.broker_environment, **(environment or {})}).start()

    def stage(self, name: str, broker: EmbeddedBroker | None = None, **options: Any) -> Stage:
        """Return a fresh queue for a fault, on the campaign's broker or on one of its own, which ends with it."""
        # Only the name of a queue: it must be new on this broker, and say when it was made.
        queue = f"{name}.{time.time_ns() // 1_000_000}"
        evidence = None if self.evidence is None else self.evidence / queue
        options |= {"owns_broker": broker is not None, "evidence": evidence, "patience": self.patience}
        stage = Stage(broker or self.broker, self.folder, queue, seed=self.seed, spark=self.spark, **options)
        self._stages.append(stage)
        return stage

    def copy_stage(self, name: str, **options: Any) -> CopyStage:
        """Return a file and a queue that it is copied to, on the campaign's broker."""
        from faults.on_producers import CopyStage  # noqa: PLC0415  # it imports this module's types

        stage = CopyStage(self.broker, self.folder, f"{name}.{time.time_ns() // 1_000_000}", **options)
        self._stages.append(stage)
        return stage

    def group_stage(self, kind: type[Group], name: str, **options: Any) -> Group:
        """Return a coordination group of some processes, on the campaign's broker."""
        group = f"{name}.{time.time_ns() // 1_000_000}"
        stage = kind(self.broker, self.folder, group, seed=self.seed, **options)
        self._stages.append(stage)
        return stage

    def sink_stage(self, name: str, **options: Any) -> SinkStage:
        """Return files of numbered rows and a queue that a query writes them to, on the campaign's broker."""
        from faults.on_sinks import SinkStage  # noqa: PLC0415  # it imports this module's types

        stage = SinkStage(self.broker, self.folder, f"{name}.{time.time_ns() // 1_000_000}", **options)
        self._stages.append(stage)
        return stage

    def scaled(self, count: int, least: int) -> int:
        """Return how many of *count* injections this run makes."""
        return max(least, round(count * self.scale))

    def rate(self, most: int) -> int:
        """Return at how many messages a second a fault sends: a third of *most* at the smallest scale."""
        return most if self.scale else most // 3

    def picked(self, values: Sequence[Value], count: int, least: int) -> Sequence[Value]:
        """Return the first of some values, as many as this run takes."""
        return values[: self.scaled(count, least)]

    def spark(self) -> SparkSession:
        """Return the session, started with the first call."""
        if self._shared_spark is not None:
            return self._shared_spark()
        if self._own_spark is None:
            from kmq_spark.local.jars import jar_paths  # noqa: PLC0415  # not every fault needs Spark here
            from kmq_spark.spark.session import build_session, delta_settings, session_settings  # noqa: PLC0415

            settings = session_settings(jar_paths("spark"), "1g") | delta_settings()
            self._own_spark = build_session("kmq-faults", master="local[2]", settings=settings)
        return self._own_spark

    def end_stages(self) -> None:
        """End what the stages so far have left running, so that the next fault has the machine; the broker runs on."""
        # A scenario that broke off may have left the broker suspended or dead.
        self.broker.resume()
        self.broker.start()
        while self._stages:
            self._stages.pop().close()

    def close(self) -> None:
        """End everything that was started here."""
        self.end_stages()
        if self._own_spark is not None:
            self._own_spark.stop()
        if self._owns_broker:
            self.broker.close()
