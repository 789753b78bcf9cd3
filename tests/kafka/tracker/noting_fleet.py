"""Processes of a fleet, in threads of this one, with trackers that track nothing and note when they ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kmq_spark.config import Settings, load_settings
from kmq_spark.coordination import Coordinator
from kmq_spark.core.coordination.records import fleet_group
from kmq_spark.errors import FencedError, KmqError
from kmq_spark.tracker.fleet import FleetTracker, TrackerFleet
from tests.kafka.conftest import wait_until
from tests.limits import COMES_S

if TYPE_CHECKING:
    from typing import Self

T_S = 5.0
"""Interval of heartbeats, seconds: a claim is over where a loaded machine stands still for that long."""

LOOK_S = 0.02


class NotingTracker:
    """A tracker that tracks nothing and notes when it ran."""

    def __init__(
        self, queue: str, error: Exception | None = None, *, hangs: bool = False, is_ready: bool = True
    ) -> None:
        """
        Run until stopped, or raise *error* at once.

        One that *hangs* reacts to `end` and not to `stop`. One that is not ready has not had its first batch.
        """
        self.queue, self._error, self._hangs = queue, error, hangs
        self.began_s = self.ended_s = 0.0
        self.is_asked_to_stop = False
        self.gives_way_s = 0.0
        self.is_ready = is_ready
        self._stopping, self.end = threading.Event(), threading.Event()

    @property
    def is_running(self) -> bool:
        """Whether it began and has not ended."""
        return self.began_s > 0 and not self.ended_s

    def run(self) -> None:
        """Run."""
        self.began_s = time.monotonic()
        try:
            if self._error is not None:
                raise self._error
            (self.end if self._hangs else self._stopping).wait()
            if self._error is not None:
                raise self._error
        finally:
            self.ended_s = time.monotonic()

    def stop(self) -> None:
        """Note that it is to end, unless it has been fenced: the fleet may not have seen that yet."""
        self.is_asked_to_stop |= not self._stopping.is_set()
        self._stopping.set()

    def fence(self) -> None:
        """End with an error, as a tracker does when another one of its queue has opened its sender."""
        self._error = FencedError("fenced by a newer tracker")
        self._stopping.set()

    def wait_ready(self, timeout_s: float) -> bool:
        """Return soon whether it had its first batch."""
        if not self.is_ready:
            time.sleep(min(timeout_s, LOOK_S))
        return self.is_ready


class Process:
    """A process of a fleet, in a thread of this one."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        make: Callable[[str], NotingTracker],
        fence: Callable[[str], None] = lambda _queue: None,
    ) -> None:
        self.made: list[NotingTracker] = []
        self.events: list[tuple[str, str]] = []
        self.failure: BaseException | None = None
        self.engine_error: KmqError | None = None

        def made(queue: str) -> FleetTracker:
            fence(queue)
            self.made.append(make(queue))
            return self.made[-1]

        self.fleet = TrackerFleet(
            name,
            settings,
            made,
            check_engine=self._check_engine,
            on_event=lambda event, queue: self.events.append((event, queue)),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def running(self) -> list[str]:
        """Return the queues whose trackers run here."""
        return sorted(tracker.queue for tracker in self.made if tracker.is_running)

    def tracker(self, queue: str) -> NotingTracker:
        """Return the newest tracker of a queue here."""
        return [tracker for tracker in self.made if tracker.queue == queue][-1]

    def end(self) -> None:
        """End cleanly."""
        for tracker in self.made:
            tracker.end.set()
        self.fleet.stop()
        self._thread.join(COMES_S)
        assert not self._thread.is_alive()

    def wait_end(self) -> BaseException | None:
        """Wait for the end of `run`; return what it raised."""
        self._thread.join(COMES_S)
        assert not self._thread.is_alive()
        return self.failure

    def _check_engine(self) -> None:
        if self.engine_error is not None:
            raise self.engine_error

    def _run(self) -> None:
        try:
            self.fleet.run()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.failure = error


class Fleet:
    """A fleet of one test."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self.name = f"fleet-{time.time_ns()}"
        self.servers, self.topic = bootstrap_servers, topic
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        """Begin without processes."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, all at once: one that hands its queues over would wait for those that are not ready."""
        for process in self._processes:
            process.fleet.stop()
        for process in self._processes:
            process.end()

    def process(
        self,
        member: str,
        *queues: str,
        make: Callable[[str], NotingTracker] = NotingTracker,
        is_fencing: bool = True,
        **tracker: Any,
    ) -> Process:
        """Start a process, and wait until it has joined. Each of its trackers fences the older ones of its queue."""
        settings = load_settings(
            None,
            {
                "kafka": {"bootstrap_servers": self.servers},
                "tracker": {
                    "queues": queues, "fleet": self.name, "fleet_member": member, "fleet_heartbeat": T_S,
                    "coordination_topic": self.topic, **tracker,
                },
            },
        )  # fmt: skip
        fence = self._fence if is_fencing else lambda _queue: None
        self._processes.append(Process(settings, self.name, make, fence))
        process = self._processes[-1]
        assert wait_until(lambda: ("joined", "") in process.events or process.failure is not None)
        return process

    def _fence(self, queue: str) -> None:
        for tracker in [tracker for process in self._processes for tracker in process.made if tracker.queue == queue]:
            tracker.fence()

    def operator(self) -> Coordinator:
        """Follow the fleet's group."""
        observer = Coordinator(fleet_group(self.name), bootstrap_servers=self.servers, topic=self.topic)
        observer.watch()
        return observer
