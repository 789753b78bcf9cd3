"""
A queue under fault: its senders, workers and trackers, its end, and the verdict.

Rule 1: each fault has a queue and a folder of its own, so that its verdict and its lateness are its own.
Rule 2: trackers, workers and brokers are processes, and may be the victim; only senders live in this one.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient, NewTopic

from faults.checker import check, open_messages
from faults.events import EventFile, read_events
from faults.evidence import INJECTOR, TRACKER, WORKER, Evidence, Reported, Verdict
from faults.hands import JOB, TRANSACTION
from faults.load import LOGICAL_QUEUE, Sender, marker_producer, mixed, nothing
from faults.processes import CANARY, NEVER_MS, SECRET, Child, Tracker, Watch, Worker, now_ms
from faults.topics import Dump, read_dump, results_of, without
from faults.waits import Bounds, Interval, gaps
from faults.worker import Profile
from kmq_spark.core.policy import DEFAULT_RULES
from kmq_spark.kafka.queue_rules import checked_rules, write_rules
from kmq_spark.kafka.topics import create_queue_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from faults.campaign import Campaign
    from faults.clocks import MovableClock
    from kmq_spark.local.broker import EmbeddedBroker
    from kmq_spark.local.cluster import EmbeddedCluster

PROTOCOLS: dict[str, dict[str, str]] = {
    "consumer": {},
    # The consumer protocol has these of the broker.
    "classic": {"session.timeout.ms": "2000", "heartbeat.interval.ms": "500"},
}
"""Group protocols, and what each needs so that a death is noticed in two seconds."""

WAYS: dict[str, dict[str, Any]] = {
    # The consumer's own values, but for the lease.
    "defaults": {"isolate_after": 2, "max_in_flight": 1_000, "threads": 8},
    "receive": {"mode": "receive", "size": 50},
    "transaction": {"mode": TRANSACTION, "max_in_flight": 50},
    "jobs": {"mode": JOB, "max_in_flight": 20, "work_ms": 5},
    "many threads": {"size": 20, "threads": 16},
    # Each message of a batch waits for those before it, so batches are small.
    "batches": {"mode": "batch", "size": 25, "threads": 4},
}
"""How a worker may work: fields of its profile, by name."""

CALM: dict[str, Any] = {"raised": 0.0, "rejected": 0.0, "poison": 0.0, "slow": 0.0}
"""Handlers that only work."""

DRAIN_S, DEFERRED_S, LONGEST_DRAIN_S = 60.0, 20.0, 300.0
"""
I9: longest drain where something is open that is not deferred; how long after its deferral a message may still be open;
longest drain in which deferrals, of two minutes at most, are waited for.
"""

SURVIVOR_S = 20.0
"""I9: within this time a worker that survived is given a message, while some are sent."""

DRAIN_WORK_MS = 10
KILL_BOUND_S, LOST_CHECKPOINT_BOUND_S, NO_BOUND_S = 30.0, 60.0, float("inf")
"""I8: recovery of a tracker."""

_OPENED = re.compile(r"tracker (\S+) of (\S+) started: reads markers from")


class Judged:
    """What a fault is injected into, with the processes around it; the campaign ends it."""

    broker_count = 1

    def __init__(self, campaign: Campaign, name: str) -> None:
        # It must be new on this broker, and say when it was made.
        self.name = f"{name}.{now_ms()}"
        self.folder = campaign.folder / self.name
        self.folder.mkdir(parents=True)
        self.seed, self.pace, self._began_s = campaign.seed, campaign.pace, time.monotonic()
        self.random = random.Random(f"{campaign.seed}:{name}")  # noqa: S311  # repeatable
        self.injections = self.injected_beside = 0
        self.notes: list[str] = []
        self.failures: list[str] = []
        self.recovery_s: list[float] = []
        self.protocols: set[str] = set()
        self.children: list[Child] = []
        self._closing: list[Callable[[], object]] = []
        self._numbers = itertools.count()
        campaign.stages.append(self)

    @property
    def patience(self) -> float:
        """Factor of the limits of time."""
        return self.pace.since(self._began_s)

    def fail(self, what: str) -> None:
        """Note that something went wrong, or what a scenario has judged itself (`I9: …`): it counts as a violation."""
        self.failures.append(what)

    def verdict(self) -> Verdict:
        """Read what the processes left, and check it."""
        found = Verdict()
        for failure in self.failures:
            invariant, _, what = failure.partition(": ")
            is_named = re.fullmatch(r"[A-Z]\d+", invariant)
            found.add(*((invariant, what) if is_named else ("harness", failure)))
        return found

    def on_close(self, call: Callable[[], object]) -> None:
        """Call *call* when all processes of the stage have ended."""
        self._closing.append(call)

    def close(self) -> None:
        """End every process that still runs."""
        for child in self.children:
            child.end()
        for call in self._closing:
            call()


class Stage(Judged):
    """One queue."""

    def __init__(
        self,
        campaign: Campaign,
        name: str,
        *,
        broker: EmbeddedBroker | EmbeddedCluster | None = None,
        clock: MovableClock | None = None,
        partitions: int = 4,
        max_deliveries: int = 3,
        is_mixed: bool = False,
        protocols: Collection[str] = tuple(PROTOCOLS),
        **profile: Any,
    ) -> None:
        super().__init__(campaign, name)
        self.queue, self.partitions, self._own_broker, self._clock = self.name, partitions, broker, clock
        self.bootstrap_servers = (broker or campaign.broker).bootstrap_servers
        protocol = self.random.choice(sorted(protocols))
        self.protocols = {protocol}
        profile = {"group_protocol": protocol, "extra": PROTOCOLS[protocol] | SECRET, **profile}
        self.profile = Profile(self.bootstrap_servers, self.queue, seed=self.seed, **profile)
        self.events = EventFile.of(self.folder, INJECTOR)
        self.events.write("queue", name=self.queue)
        self.markers = marker_producer(self.bootstrap_servers)
        self.injected_markers: set[tuple[int, int]] = set()
        self.hostile: set[tuple[int, int]] = set()
        self.bounds, self.is_drained = Bounds(), False
        self._passed: set[str] = set()
        self._away: list[Interval] = []
        self._held_up: list[Interval] = []
        self._senders: list[Sender] = []
        self._remembered: list[Dump] = []
        self._began_ms, self._lock = now_ms(), threading.Lock()
        self._ask = mixed if is_mixed else nothing
        self.logical_queues = ("", LOGICAL_QUEUE) if is_mixed else ("",)
        self._make_queue(self._mixed_rules() if is_mixed else {}, max_deliveries)
        names = list(WAYS)
        self.random.shuffle(names)
        self._ways = itertools.cycle(names)
        self._watch = Watch(lambda: list(self.children), self.events)
        self._watch.start()

    def _mixed_rules(self) -> dict[str, Any]:
        return {
            "backoff": self.random.choice(("constant", "linear", "exponential")),
            "backoff_initial": 0.3,
            "backoff_max": 2,
            "backoff_jitter": self.random.choice((0.0, 0.5)),
            "expired": self.random.choice(("drop", "dead-letter")),
        }

    def _make_queue(self, rules: Mapping[str, Any], max_deliveries: int) -> None:
        create_queue_topics(self.queue, bootstrap_servers=self.bootstrap_servers, partitions=self.partitions)
        wanted = checked_rules({"max_deliveries": max_deliveries, **rules})
        write_rules(self.queue, wanted, expected_version=0, bootstrap_servers=self.bootstrap_servers)
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        self.done(self.admin.create_topics([NewTopic(results_of(self.queue), 1)]))

    @staticmethod
    def done(futures: Mapping[Any, Any]) -> None:
        """Wait until what an admin client was asked for is done."""
        for future in futures.values():
            future.result()

    # What happens.

    def injected(self, what: str, **fields: object) -> None:
        """Count an injection and write it down; safe for threads."""
        with self._lock:
            self.injections += 1
            self._passed.add(str(fields.get("point", "")))
        self.events.write("injected", what=what, **fields)

    def must_have_passed(self, points: Iterable[str]) -> None:
        """Fail for each crash point that ended no process: a fault that was not injected has proved nothing."""
        for point in sorted(set(points) - self._passed):
            self.fail(f"crash point {point} ended no process")

    @contextmanager
    def away(self, after_s: float = 0.0) -> Iterator[None]:
        """Note that something is away on purpose in a block, and for some seconds after it, which excuse waits."""
        begin_ms = now_ms()
        try:
            yield
        finally:
            with self._lock:
                self._away.append(Interval(begin_ms, now_ms() + round(1000 * after_s)))

    def held_up(self, seconds: float) -> None:
        """Note that a process may have died in a transaction: redeliveries wait for *seconds* from now on."""
        with self._lock:
            self._held_up.append(Interval(now_ms(), now_ms() + round(1000 * seconds)))

    def judge(self, **bounds: Any) -> None:
        """Set what this fault allows unlike the others."""
        self.bounds = replace(self.bounds, **bounds)

    def send(self, rate: float = 150, count: int = 0, **options: Any) -> Sender:
        """Start a sender; with a *count* it ends by itself."""
        sender = Sender(self, rate=rate, count=count, **{"ask": self._ask, **options})
        self._senders.append(sender)
        sender.start()
        return sender

    def worker(self, name: str, failpoint: str = "", clock: Any = None, **profile: Any) -> Worker:  # noqa: ANN401  # a FalseClock
        """Start a worker."""
        values = replace(self.profile, name=f"{name}-{next(self._numbers)}", **profile)
        child = Worker(values, self.folder, failpoint=failpoint, clock=clock)
        with self._lock:
            self.children.append(child)
        return child

    def crew(self, name: str, **profile: Any) -> list[Worker]:
        """Start a worker for each logical queue."""
        return [self.worker(f"{name}{queue}", logical_queue=queue, **profile) for queue in self.logical_queues]

    def way(self) -> dict[str, Any]:
        """Return how the next worker works: each way in turn."""
        return WAYS[next(self._ways)]

    def tracker(self, checkpoint: str = "checkpoint", **options: Any) -> Tracker:
        """Start a tracker."""
        servers = options.pop("bootstrap_servers", self.bootstrap_servers)
        at = self.folder / checkpoint
        name = str(next(self._numbers))
        child = Tracker([self.queue], servers, self.folder, name, checkpoint=at, **options)
        self.children.append(child)
        return child

    def tracked(self, bound_s: float = NO_BOUND_S, **options: Any) -> Tracker:
        """Start a tracker, and wait until it works; where one worked before, judge how long that took (I8)."""
        tracker = self.tracker(**options)
        self.recovered(tracker, bound_s)
        return tracker

    def recovered(self, tracker: Tracker, bound_s: float = KILL_BOUND_S) -> None:
        """Wait until a tracker works; note how long that took, and where it took too long."""
        took_s = tracker.wait_ready()
        if took_s < 0:
            self.fail(f"I9: the tracker did not get ready: {tracker.last_words()}")
            return
        self.judge_recovery(tracker, took_s, bound_s)

    def judge_recovery(self, tracker: Tracker, took_s: float, bound_s: float = KILL_BOUND_S) -> None:
        """Note a recovery, and fail where it took too long."""
        self.recovery_s.append(took_s)
        bound_s *= self.pace.since(time.monotonic() - took_s)
        if took_s > bound_s:
            self.fail(f"I8: recovery took {took_s:.1f} s, bound {bound_s:g} s: {tracker.last_words()}")

    def leave_broker(self) -> None:
        """Leave the broker to another stage that ends later."""
        self._own_broker = None

    def dump(self) -> Dump:
        """Read the topics as they are now."""
        return read_dump(self.queue, self.bootstrap_servers)

    def remember(self) -> None:
        """Read the queue topic for the verdict, before records of it are removed."""
        self._remembered.append(self.dump())

    # The end.

    @property
    def _trackers(self) -> list[Tracker]:
        return [child for child in self.children if isinstance(child, Tracker) and child.kind == TRACKER]

    @property
    def workers(self) -> list[Worker]:
        """Workers that run."""
        return [child for child in self.children if isinstance(child, Worker) and child.is_running]

    def drain(self, workers: int = 2, timeout_s: float = DRAIN_S) -> None:
        """
        Stop the senders, let everything be worked off, and end all processes.

        By the workers that survived the faults, where there are any: a survivor that hangs must not be covered up by a
        fresh one. Only in a logical queue where none is left, fresh ones do it.
        """
        survivors = self.workers
        self._judge_survivors(survivors)
        for sender in self._senders:
            sender.stop()
        work_ms = min(self.profile.work_ms, DRAIN_WORK_MS)
        idle: dict[str, Any] = {"mode": "run", "keep_alive": True, "slow": 0.0, "forgotten": 0.0}
        idle |= {"kills_every": 0, "work_ms": work_ms}
        for queue in sorted(set(self.logical_queues) - {child.logical_queue for child in survivors}):
            for _ in range(workers):
                self.worker("drain", logical_queue=queue, **idle)
        self.is_drained, began_s = True, time.monotonic()
        give_up_s = began_s + timeout_s * self.patience
        try:
            while (open_until := self.open()) and time.monotonic() < give_up_s:
                is_all_deferred = min(open_until) > time.time() * 1000
                if is_all_deferred and time.monotonic() < began_s + LONGEST_DRAIN_S:
                    give_up_s = max(give_up_s, time.monotonic() + DEFERRED_S * self.patience)
                time.sleep(1.0)
            if open_until:
                waited_s = time.monotonic() - began_s
                self.fail(f"I9: {len(open_until)} messages are open {waited_s:.0f} s after the last fault")
        finally:
            for child in survivors:
                if not child.is_running:
                    self.fail(f"I9: {child.name} ended by itself with {child.exit_code}: {child.last_words()}")
            self.end_all()

    def end_all(self) -> None:
        """Ask every process to end; workers first: the verdict reads topic after topic, so nothing may be written."""
        for child in sorted(self.children, key=lambda each: each.kind != WORKER):
            if child.is_running:
                child.stop()

    def _judge_survivors(self, survivors: Sequence[Worker]) -> None:
        """I9: while messages are sent, each worker that was there before the faults is given some, by itself."""
        if not any(sender.is_alive() for sender in self._senders):
            return
        since_s, most_s = time.monotonic(), SURVIVOR_S * self.patience
        waiting: list[Worker] = []
        for queue in self.logical_queues:
            group = [child for child in survivors if child.logical_queue == queue]
            # Of more members than partitions some have none.
            waiting += group if len(group) <= self.partitions else []
        while waiting and time.monotonic() < since_s + most_s:
            waiting = [child for child in waiting if not _was_given_since(child, since_s)]
            time.sleep(0.5)
        for child in waiting:
            self.fail(f"I9: worker {child.name}, which survived the faults, was given nothing in {most_s:g} s")

    def open(self) -> Collection[int]:
        """Return until when each open message is deferred, 0 for not."""
        dump = self.dump()
        without(dump, self.hostile)
        return open_messages(dump, DEFAULT_RULES).values()

    def close(self) -> None:
        """End whatever still runs, a broker of its own included."""
        self._watch.stop()
        for sender in self._senders:
            sender.stop()
        # Clients that outlive their broker complain.
        vars(self).pop("markers", None)
        vars(self).pop("admin", None)
        if self._own_broker is not None:
            self._closing.append(self._own_broker.close)
        super().close()

    # The verdict.

    def verdict(self) -> Verdict:
        """Read the topics and the event files, and check them."""
        found, evidence = super().verdict(), self.evidence()
        verdict = check(evidence)
        verdict.violations = [*found.violations, *verdict.violations]
        for file in sorted(self.folder.rglob("*")):
            if file.is_file() and CANARY.encode() in file.read_bytes():
                verdict.add("I14", f"{file.relative_to(self.folder)} holds a secret of the settings")
        (self.folder / "verdict.json").write_text(json.dumps([verdict.violations, verdict.counts], indent=1))
        return verdict

    def evidence(self) -> Evidence:
        """Return what the verdict is made from."""
        dump = self.dump()
        present = {record.place: record for record in dump.messages}
        removed = {
            record.place: record for old in self._remembered for record in old.messages if record.place not in present
        }
        dump.messages = [*removed.values(), *present.values()]
        dump.removed, dump.injected = set(removed), self.injected_markers
        without(dump, self.hostile)
        bounds = self._true_bounds()
        return Evidence(
            dump,
            list(read_events(self.folder)),
            self.tracker_ids(),
            DEFAULT_RULES,
            bounds if self._clock is None else self._clock.corrected(bounds, dump),
            [child.as_evidence() for child in self.children],
            self.injections + self.injected_beside,
            # A tracker counts hostile STARTs too, until their leases end; the evidence does not have them.
            {} if self.hostile else self.reported(),
            self.is_drained,
            _checkpoint_mib(self.folder),
        )

    def _true_bounds(self) -> Bounds:
        """Return the bounds of this fault, with what was away: on purpose, and while no tracker was there."""
        present = [child.presence() for child in self._trackers]
        known = [interval for interval in present if interval is not None]
        away = [*self._away, *gaps(known, Interval(self._began_ms, NEVER_MS))]
        return replace(self.bounds.stretched(self.patience), away=away, held_up=list(self._held_up))

    def tracker_ids(self) -> set[str]:
        """Return the ids of the trackers that took over, from what they logged."""
        return {
            match[1]
            for log in self.folder.glob("tracker*.log")
            for match in _OPENED.finditer(log.read_text(errors="replace"))
            if match[2] == self.queue
        }

    def reported(self) -> dict[int, Reported]:
        """Return the status that the last tracker reported, by markers partition; empty where it was killed."""
        last = next((child for child in reversed(self._trackers) if child.statuses(self.queue)), None)
        if last is None:
            return {}
        begins_at = _begins_at(last.checkpoint / self.queue)
        return {
            partition: Reported(
                begins_at.get(partition, 0), int(values["next_marker_offset"]), int(values["in_flight"]),
                values["counters"],
            )
            for partition, values in last.statuses(self.queue).items()
        }  # fmt: skip


def _was_given_since(worker: Worker, monotonic_s: float) -> bool:
    return any(event["monotonic"] >= monotonic_s for event in reversed(worker.events("delivered")))


def _checkpoint_mib(folder: Path) -> int:
    """Return the size of the largest checkpoint below a folder."""
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
