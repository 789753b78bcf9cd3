"""
A queue under fault: its senders, workers and trackers, its end, and the verdict.

Rule 1: each fault has a queue and a folder of its own, so that its verdict and its lateness are its own.
Rule 2: the broker and the Spark session live through the whole campaign; a tracker inside this process is the same
`QueueTracker` that `kmq tracker run` runs, and where the tracker itself is the victim it is a process of its own.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient, NewTopic

from faults.checker import Verdict
from faults.drains import DRAIN_TIMEOUT_S, DrainLimit, open_until_ms
from faults.events import EventFile
from faults.evidence import RECORDS, REMEMBERED, RecordFile, facts_text, keep_rest
from faults.judge import verdict_of
from faults.judged_stage import JudgedStage
from faults.mix import LOGICAL_QUEUE, Mix, ask
from faults.processes import NEVER_MS, Child, PeakWatch, TrackerChild, WorkerChild
from faults.secrets import JAVA_SECRET, SECRET
from faults.sender import Sender
from faults.topics import Dump, read_dump, results_of, without
from faults.tracker_traces import checkpoint_mib, reported, sessions
from faults.waits import Bounds, Interval, gaps
from faults.worker import Profile
from kmq_spark.config import QueueSettings, load_settings
from kmq_spark.kafka.queue_rules import write_rules
from kmq_spark.kafka.settings import admin_config
from kmq_spark.kafka.topics import create_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from faults.clocks import FalseClock, MovableClock
    from faults.conservation import ReportedStatus
    from faults.leases import Session
    from faults.protocol import MessageId
    from kmq_spark.core.state import Status as TrackerStatus
    from kmq_spark.local.broker import EmbeddedBroker
    from kmq_spark.tracker.queue_tracker import QueueTracker

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

PROTOCOLS: dict[str, dict[str, str]] = {
    "consumer": {},
    # The consumer protocol has these of the broker.
    "classic": {"session.timeout.ms": "2000", "heartbeat.interval.ms": "500"},
}
"""Group protocols, and what each needs so that a death is noticed in two seconds."""

DRAIN_WORK_MS = 10
"""Longest work of the handlers that only work off what is left."""

SURVIVOR_S = 20.0
"""I9: within this time a worker that survived is given a message, while some are sent."""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _workers_idle_profile(profile: Profile) -> Profile:
    """Return the profile of workers that only work off what is left: as before, nothing forgotten, nothing slow."""
    work_ms = min(profile.work_ms, DRAIN_WORK_MS)
    return replace(profile, name="drain", mode="run", keep_alive=True, slow=0.0, forgotten=0.0, work_ms=work_ms)


class Stage(JudgedStage):
    """
    One queue.

    Args:
        broker: Running.
        folder: Folder of the campaign; the queue gets one inside.
        queue: Name.
        seed: Seed of everything that is chosen.
        partitions: Partitions of the queue.
        max_deliveries: Limit.
        spark: For a tracker in this process.
        clock: Clock of the broker, where it may be moved.
        owns_broker: Whether the broker ends with the stage.
        patience: Factor of every time limit and of every bound of a wait; more than 1 on a loaded machine.
        evidence: Folder for what the verdict is made from; None where it is not kept.
        is_mixed: Whether messages ask for delays, times to live and a logical queue, the queue has a backoff, and
            workers may work in the ways of `mix.WAYS`.
        profile: Values that its workers have unlike the default.
    """

    def __init__(
        self,
        broker: EmbeddedBroker,
        folder: Path,
        queue: str,
        *,
        seed: int,
        partitions: int = 4,
        max_deliveries: int = 3,
        spark: Callable[[], SparkSession] | None = None,
        clock: MovableClock | None = None,
        owns_broker: bool = False,
        patience: float = 1.0,
        evidence: Path | None = None,
        is_mixed: bool = False,
        **profile: Any,
    ) -> None:
        """Make the queue."""
        super().__init__()
        # By the fault's name, not by its queue's, which carries the time.
        fault = queue.partition(".")[0]
        choice = random.Random(f"{seed}:{fault}").choice(sorted(PROTOCOLS))  # noqa: S311  # repeatable
        profile = {"group_protocol": choice, "extra": PROTOCOLS[choice] | SECRET, **profile}
        self.broker, self.queue, self.seed, self.max_deliveries = broker, queue, seed, max_deliveries
        self.bootstrap_servers, self.patience = broker.bootstrap_servers, patience
        self.folder = folder / queue
        self.folder.mkdir(parents=True)
        self.layout = create_queue(queue, bootstrap_servers=self.bootstrap_servers, partitions=partitions)
        self.profile = Profile(self.bootstrap_servers, queue, str(self.folder), seed=seed, **profile)
        self.mix = Mix(seed, fault) if is_mixed else None
        if self.mix is not None:
            self._mix(self.mix)
        self.events = EventFile(self.folder, "injector")
        self.shared_injections = 0
        self._passed: set[str] = set()
        self.is_drained = False
        self.bounds = Bounds()
        self.injected_markers: set[tuple[int, int]] = set()
        self.hostile_markers: set[tuple[int, int]] = set()
        self._clock, self._owns_broker, self._evidence = clock, owns_broker, evidence
        self._away: list[Interval] = []
        self._held_up: list[Interval] = []
        self._tracked: list[Interval] = []
        self._began_ms = _now_ms()
        self._remembered = Dump()
        self._spark = spark
        self._children: list[Child] = []
        self._crew: list[WorkerChild] = []
        self._senders: list[Sender] = []
        self._last_reported: tuple[Path, Mapping[int, TrackerStatus]] | None = None
        self._lock = threading.Lock()
        self._peaks = PeakWatch(lambda: list(self._children))
        self._peaks.start()
        self._closing: list[Callable[[], object]] = []

    def _mix(self, mix: Mix) -> None:
        """Give the queue its rules, and a topic for results."""
        rules = QueueSettings(max_deliveries=self.max_deliveries, **mix.rules)
        write_rules(self.queue, rules, expected_version=0, bootstrap_servers=self.bootstrap_servers)
        admin = AdminClient(admin_config(self.bootstrap_servers))
        for future in admin.create_topics([NewTopic(results_of(self.queue), 1, 1)]).values():
            future.result()

    @property
    def group_protocols(self) -> set[str]:
        """Group protocols of the workers."""
        return {self.profile.group_protocol}

    def injected(self, what: str, **fields: object) -> None:
        """Count an injection and write it down; safe for threads."""
        with self._lock:
            self.injections += 1
            self._passed.add(str(fields.get("point", "")))
        self.events.write("injected", what=what, **fields)

    def shares_injection(self, what: str, **fields: object) -> None:
        """
        Write down an injection that another stage of the same fault counts.

        The injected process belongs to both stages, so a report of the fault counts the injection once.
        """
        self.shared_injections += 1
        self.events.write("injected", what=what, **fields)

    def must_have_passed(self, points: Iterable[str]) -> None:
        """Note each crash point that ended no process: a fault that was not injected has proved nothing."""
        for point in sorted(set(points) - self._passed):
            self.fail(f"crash point {point} ended no process")

    @contextmanager
    def away(self, after_s: float = 0.0) -> Iterator[None]:
        """Note that something is away on purpose in a block, and for some seconds after it, which excuse waits."""
        begin_ms = _now_ms()
        try:
            yield
        finally:
            with self._lock:
                self._away.append(Interval(begin_ms, _now_ms() + round(1000 * after_s)))

    def held_up(self, seconds: float) -> None:
        """Note that a process may have died in a transaction: redeliveries wait for *seconds* from now on."""
        with self._lock:
            self._held_up.append(Interval(_now_ms(), _now_ms() + round(1000 * seconds)))

    def keeps_broker(self) -> None:
        """Leave the broker to another stage that ends later."""
        self._owns_broker = False

    def judge(self, **bounds: Any) -> None:
        """Set what this fault allows unlike the others."""
        self.bounds = replace(self.bounds, **bounds)

    def send(self, rate: float = 150, count: int = 0, **options: Any) -> Sender:
        """Start a sender; with a *count* it ends by itself."""
        seed = self.seed + len(self._senders)
        options = {"ask": None if self.mix is None else ask, **options}
        sender = Sender(self.bootstrap_servers, self.queue, self.folder, rate=rate, seed=seed, count=count, **options)
        self._senders.append(sender)
        sender.start()
        return sender

    def worker(self, name: str, failpoint: str = "", clock: FalseClock | None = None, **profile: Any) -> WorkerChild:
        """Start a worker."""
        values = replace(self.profile, name=name, **profile)
        child = WorkerChild(values, self.folder, failpoint=failpoint, clock=clock)
        with self._lock:
            self._children.append(child)
        return child

    def crew(self, name: str, **profile: Any) -> list[WorkerChild]:
        """Start a worker for each logical queue."""
        return [
            self.worker("-".join(filter(None, (name, queue))), logical_queue=queue, **profile)
            for queue in self._logical_queues
        ]

    @property
    def _logical_queues(self) -> tuple[str, ...]:
        return ("",) if self.mix is None else ("", LOGICAL_QUEUE)

    @property
    def workers(self) -> list[WorkerChild]:
        """Workers that run."""
        return [child for child in self._children if isinstance(child, WorkerChild) and child.is_running]

    def tracker(self, checkpoint: str = "checkpoint", **options: Any) -> TrackerChild:
        """Start a tracker in a process of its own."""
        child = TrackerChild(
            options.pop("bootstrap_servers", self.bootstrap_servers),
            self.queue,
            self.folder,
            checkpoint_dir=self.folder / checkpoint,
            max_deliveries=self.max_deliveries,
            **options,
        )
        self._children.append(child)
        return child

    def must_get_ready(self, tracker: TrackerChild) -> None:
        """Wait until a tracker is ready; I9 is broken if it ends before."""
        if tracker.wait_ready() < 0:
            self.fail(f"I9: the tracker did not get ready: {tracker.last_words()}")

    @contextmanager
    def tracking(self, **settings: object) -> Iterator[QueueTracker]:
        """Run a tracker in this process for the time of a block."""
        from kmq_spark.tracker.queue_tracker import QueueTracker  # noqa: PLC0415  # Spark loads only where it is used

        assert self._spark is not None
        flags: dict[str, dict[str, Any]] = {
            "kafka": {"bootstrap_servers": self.bootstrap_servers, "extra": SECRET, "spark_extra": JAVA_SECRET},
            "queue": {"max_deliveries": self.max_deliveries},
            "tracker": {
                "checkpoint_dir": str(self.folder / "checkpoint"),
                "state_partitions": 2,
                "commit_interval_ms": 1_000,
                **settings,
            },
        }
        tracker, ready_at_ms = QueueTracker(self._spark(), self.queue, load_settings(None, flags)), _now_ms()
        thread = threading.Thread(target=self._run_tracker, args=(tracker,), daemon=True)
        with self._service_log():
            thread.start()
            try:
                if not tracker.wait_ready(90 * self.patience):
                    self.fail("the tracker did not get ready")
                ready_at_ms = _now_ms()
                yield tracker
            finally:
                self._tracked.append(Interval(ready_at_ms, _now_ms()))
                tracker.stop()
                thread.join(60)
                self._last_reported = (self.folder / "checkpoint", tracker.stats.statuses)

    def drain(self, workers: int = 2, timeout_s: float = DRAIN_TIMEOUT_S) -> float:
        """
        Stop the senders, let everything be worked off, and return how long it took.

        By the workers that survived the faults, where there are any: a survivor that hangs must not be covered up by
        a fresh one. Only where none is left, fresh ones do it.

        Args:
            workers: How many fresh ones, for each logical queue.
            timeout_s: I9 is broken after it, times the patience; longer where all that is open is deferred, see
                `faults.drains`.
        """
        survivors = self.workers
        self._judge_survivors(survivors)
        for sender in self._senders:
            sender.stop()
        profile = _workers_idle_profile(self.profile)
        left_alone = set(self._logical_queues) - {child.logical_queue for child in survivors}
        crew = [
            WorkerChild(replace(profile, name=f"drain{number}{queue}", logical_queue=queue), self.folder)
            for queue in sorted(left_alone)
            for number in range(workers)
        ]
        self._crew += crew
        began_s = time.monotonic()
        self.is_drained = True
        try:
            limit = DrainLimit(began_s, timeout_s, self.patience)
            while left := self._open():
                now_s = time.monotonic()
                if limit.is_over(left.values(), now_s, time.time() * 1000):
                    who = f"{len(survivors)} workers that survived" if survivors else f"{workers} fresh workers"
                    waited_s = now_s - began_s
                    self.fail(f"I9: {len(left)} messages are open {waited_s:.0f} s after the last fault, with {who}")
                    break
                time.sleep(1.0)
        finally:
            ended = [child for child in survivors if not child.is_running]
            # Trackers last, and then: the verdict reads topic after topic, so nothing may be committed meanwhile.
            for kind in (WorkerChild, TrackerChild):
                for child in (*self._children, *crew):
                    if isinstance(child, kind):
                        child.stop()
            self._judge_exits((*survivors, *crew), ended)
        return time.monotonic() - began_s

    def _judge_survivors(self, survivors: Sequence[WorkerChild]) -> None:
        """I9: while messages are sent, each worker that was there before the faults is given some, by itself."""
        if not any(sender.is_alive() for sender in self._senders):
            return
        since_s, most_s = time.monotonic(), SURVIVOR_S * self.patience
        waiting: list[WorkerChild] = []
        for queue in self._logical_queues:
            group = [child for child in survivors if child.logical_queue == queue]
            # Of more members than partitions some have none.
            waiting += group if len(group) <= self.layout.partition_count else []
        while waiting and time.monotonic() < since_s + most_s:
            waiting = [child for child in waiting if not child.was_given_since(since_s)]
            time.sleep(0.5)
        for child in waiting:
            self.fail(f"I9: worker {child.name}, which survived the faults, was given nothing in {most_s:g} s")

    def _judge_exits(self, workers: Sequence[WorkerChild], ended: Sequence[WorkerChild]) -> None:
        """I9: a worker ends where it is asked to, and then, and without an error."""
        for worker in ended:
            self.fail(f"I9: worker {worker.name} ended by itself with {worker.exit_code}: {worker.last_words()}")
        for worker in workers:
            if worker not in ended and worker.exit_code:
                self.fail(f"I9: worker {worker.name} ended with {worker.exit_code}: {worker.last_words()}")

    def remember(self) -> None:
        """Read the queue topic for the verdict, before records of it are removed."""
        kept = RecordFile(self._evidence and self._evidence / REMEMBERED)
        self._remembered.messages += read_dump(self.queue, self.bootstrap_servers, kept.keep).messages
        kept.close()

    def adopt(self, child: Child) -> None:
        """Judge the end of a process that a fault has started by itself, and end it with the stage."""
        self._children.append(child)

    def on_close(self, call: Callable[[], object]) -> None:
        """Call *call* at the end of `close`, after all processes of the stage have ended."""
        self._closing.append(call)

    def close(self) -> None:
        """End whatever still runs, a broker of its own included."""
        for sender in self._senders:
            sender.stop()
        for child in self._children:
            if child.is_running:
                child.resume()
                child.kill()
        if self._owns_broker:
            self.broker.close()
        self._peaks.stop()
        for call in self._closing:
            call()

    def verdict(self, *, is_drained: bool = True) -> Verdict:
        """Read the topics and the event files, and check them."""
        kept = RecordFile(self._evidence and self._evidence / RECORDS)
        dump = read_dump(self.queue, self.bootstrap_servers, kept.keep)
        kept.close()
        # As `faults.judge` reads them again.
        facts = json.loads(facts_text(self._facts(is_drained=is_drained)))
        found = verdict_of(self.folder, facts, dump, self._remembered)
        if self._evidence is not None:
            keep_rest(self._evidence, self.folder, facts, {"violations": found.violations, "counts": found.counts})
        return found

    def _facts(self, *, is_drained: bool) -> dict[str, Any]:
        """Return everything that the verdict takes besides the topics, the event files and the logs."""
        return {
            "queue": self.queue,
            "seed": self.seed,
            "max_deliveries": self.max_deliveries,
            "is_drained": is_drained,
            "profile": asdict(self.profile),
            "injections": self.injections + self.shared_injections,
            "injected_markers": sorted(self.injected_markers),
            "hostile_markers": sorted(self.hostile_markers),
            "sessions": self.sessions(),
            "reported": {
                partition: (begins_at, status._asdict()) for partition, (begins_at, status) in self.reported().items()
            },
            "bounds": asdict(self._true_bounds()),
            "clock_epochs": None if self._clock is None else self._clock.epochs,
            "failures": self.failures,
            "notes": self.notes,
            "recovery_s": self.recovery_s,
            "checkpoint_mib": checkpoint_mib(self.folder),
            "began_ms": self._began_ms,
            "ended_ms": _now_ms(),
            "processes": [
                {
                    "kind": type(child).__name__,
                    "log": child.log.name,
                    "exit_code": child.exit_code,
                    "is_ended_by_us": child.is_ended_by_us,
                    "is_hung": child.is_hung,
                    "ended_at_ms": child.ended_at_ms,
                    "peak": child.peak,
                }
                for child in (*self._children, *self._crew)
            ],
        }

    def _true_bounds(self) -> Bounds:
        """Return the bounds of this fault, with what was away: on purpose, and while no tracker was there."""
        children = [child.presence() for child in self._children if isinstance(child, TrackerChild)]
        present = [*self._tracked, *(interval for interval in children if interval is not None)]
        away = [*self._away, *gaps(present, Interval(self._began_ms, NEVER_MS))]
        return replace(self.bounds.stretched(self.patience), away=away, held_up=list(self._held_up))

    def reported(self) -> dict[int, ReportedStatus]:
        """Return the status that the last tracker reported, by markers partition."""
        trackers = [child for child in self._children if isinstance(child, TrackerChild) and not child.is_running]
        reports = [(child.checkpoint_dir, child.statuses()) for child in trackers]
        checkpoint, statuses = next(
            (report for report in reversed(reports) if report[1]), self._last_reported or (self.folder, {})
        )
        return reported(checkpoint, self.queue, statuses)

    def sessions(self) -> list[Session]:
        """Return the trackers that took over, in their order, from what they logged."""
        return sessions(self.folder, self.queue)

    def _open(self) -> dict[MessageId, int]:
        """Return the messages that are open now, and until when each is deferred; see `open_until_ms`."""
        dump = read_dump(self.queue, self.bootstrap_servers)
        without(dump, self.hostile_markers)
        return open_until_ms(dump)

    def _run_tracker(self, tracker: QueueTracker) -> None:
        try:
            tracker.run()
        except Exception as error:
            self.fail(f"the tracker ended: {error}")
            logging.getLogger(__name__).exception("tracker of %s ended", self.queue)

    @contextmanager
    def _service_log(self) -> Iterator[None]:
        """Write the log of a tracker in this process to a file, as one in a process of its own does."""
        logger = logging.getLogger("kmq_spark")
        handler = logging.FileHandler(self.folder / f"tracker-here-{time.time_ns()}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)
            handler.close()
