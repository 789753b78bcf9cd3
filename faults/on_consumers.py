"""Faults of consumers: killed at every step and in between, paused, coming and going, with false clocks."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from faults.clocks import HOUR_MS, FalseClock, SleepingHost, is_available
from faults.events import read_events
from faults.hands import JOB, TRANSACTION
from faults.stage import CALM, WAYS, Stage
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from faults.campaign import Campaign
    from faults.processes import Worker

Job = TypeVar("Job")

STALL_MS = 10_000
"""I9: messages of a partition do not wait longer than this without any being taken."""

FEW = 40
"""Messages held at once by consumers that are to be full most of the time, and pause their partitions."""

MANY, HOLD_TIMEOUT_S = 2_000, 30.0
"""Messages that F21's consumers hold at least, and how long they may take to get them."""

POISON, WARM_UP = 0.2, 20
GOOD_RATE, RATE_S, GOOD_SHARE = 60.0, 12.0, 0.8
"""F22: good messages a second that are sent; for how long; the share of the calm rate that they must keep."""

KILLS_EVERY, KILLERS_TIMEOUT_S = 100, 120.0
SLOTS = 2
"""Victims at a time."""

UNPASSED = ("consumer.extension-sent", "consumer.revoked")
"""Points that no worker of the campaign passes for certain; tests/kafka passes them."""

CONSUMER_POINTS = tuple(name for name in FAILPOINTS if name.startswith("consumer.") and name not in UNPASSED)
POINT_TIMEOUT_S = 30.0
"""For a crash point to be passed; it takes seconds on an idle machine."""

TRANSACTION_S = 8.0
"""A consumer that dies in a transaction holds its markers partitions up until the broker has given that up."""


def killed(campaign: Campaign) -> Stage:
    """F1: `kill -9` of consumers, at every crash point and at random."""
    stage = Stage(campaign, "f1", is_mixed=True, rejected=0.01, slow=0.005)
    passages = (1, 2, 5)[: campaign.times(3)]
    jobs = [(point, nth) for point in CONSUMER_POINTS for nth in passages]
    jobs += [("", number) for number in range(campaign.times(30, least=2))]
    stage.random.shuffle(jobs)
    stage.tracked()
    stage.send(rate=campaign.rate(120))
    # No suspects for these: what a victim had alone must not wait for its turn at the end.
    stage.crew("healthy", threads=8, max_in_flight=1_000)
    _in_slots(jobs, lambda job: _kill_one(stage, *job))
    stage.must_have_passed(CONSUMER_POINTS)
    stage.drain()
    return stage


def _kill_one(stage: Stage, point: str, number: int) -> None:
    # Not every victim comes to renew a lease, or to release a message.
    if not _has_died(stage, point, number) and not _has_died(stage, point, number):
        stage.notes.append(f"{point or 'a random victim'}:{number} was not passed, or got no messages, in time")


def _has_died(stage: Stage, point: str, number: int) -> bool:
    if point:
        way = WAYS[TRANSACTION if point.startswith("consumer.tx-") else "defaults"]
        worker = stage.worker(f"victim-{point}", failpoint=f"{point}:{number}", **way)
        is_hit = worker.wait(POINT_TIMEOUT_S * stage.patience) == EXIT_CODE
    else:
        way = stage.way()
        worker = stage.worker("victim-random", **way)
        is_hit = worker.wait_working(1 + number % 40, 15 * stage.patience)
    worker.end()
    if way.get("mode") in {TRANSACTION, JOB}:
        stage.held_up(TRANSACTION_S)
    if is_hit:
        stage.injected("crash point" if point else "kill -9", point=point, number=number)
    return is_hit


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of consumers for longer than a lease, their late ENDs included."""
    stage = Stage(campaign, "f4-consumers")
    stage.judge(stall_ms=STALL_MS)
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    crew = [stage.worker("paused", max_in_flight=FEW) for _ in range(4)]
    for worker in crew:
        worker.wait_working()
    for number in range(campaign.times(12, least=2)):
        victims, seconds = [crew[number % 4], crew[(number + 1) % 4]], (0.5, 2.5, 3.5)[number % 3]
        with stage.away():
            for worker in victims:
                worker.pause()
            time.sleep(seconds)
            for worker in victims:
                worker.resume()
                stage.injected("SIGSTOP", seconds=seconds)
        time.sleep(0.4)
    stage.drain()
    return stage


def skewed(campaign: Campaign) -> Stage | None:
    """F10: consumers whose clock is an hour off, steps, or drifts."""
    if not is_available():
        return None
    stage = Stage(campaign, "f10-consumers")
    clocks = (
        *(FalseClock(HOUR_MS), FalseClock(-HOUR_MS), FalseClock(24 * HOUR_MS), FalseClock(rate_ppm=500)),
        *(FalseClock(rate_ppm=-500), FalseClock(0, 0, 3_000, HOUR_MS), FalseClock(0, 0, 3_000, -600_000)),
    )
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    stage.worker("healthy")
    _in_slots(clocks, lambda clock: _skew_one(stage, clock))
    stage.drain()
    return stage


def _skew_one(stage: Stage, clock: FalseClock) -> None:
    worker = stage.worker("skewed", clock=clock)
    if worker.wait_working(20):
        stage.injected("clock", clock=list(clock))
    else:
        stage.fail(f"I9: a consumer with the clock {clock} got no messages")
    time.sleep(3)  # beyond the step, where there is one
    worker.end()


def asleep(campaign: Campaign) -> Stage | None:
    """F32: a host that is suspended for longer than a lease, its clocks with it, under consumers and the tracker."""
    if not is_available():
        return None
    host = SleepingHost(campaign.folder)
    stage = Stage(campaign, "f32", **CALM)
    stage.judge(stall_ms=STALL_MS)
    tracker = stage.tracked(clock=host)
    stage.send(rate=campaign.rate(150))
    # Its group does not miss it so soon: what it held is its own when it wakes up, as far as it knows.
    member: dict[str, Any] = {
        "group_protocol": "classic",
        "extra": stage.profile.extra | {"session.timeout.ms": "45000"},
    }
    ways = [WAYS[name] | member | {"max_in_flight": FEW} for name in ("transaction", "transaction", "receive")]
    on_host = [stage.worker("asleep", clock=host, **way) for way in ways]
    stage.worker("awake", **member)
    for number in range(campaign.times(8, least=2)):
        on_host[0].wait_working()
        seconds, children = ((4.0, on_host), (9.0, [*on_host, tracker]))[number % 2]
        with stage.away(after_s=TRANSACTION_S):
            host.sleep(children, seconds)
        stage.injected("host suspended", seconds=seconds, tracker=tracker in children)
        time.sleep(3)
    stage.drain()
    return stage


def holding_many(campaign: Campaign) -> Stage:
    """F21: kill a consumer that holds thousands of messages, and stop one cleanly."""
    # A killed one's messages count as silent deliveries: only a limit that they cannot reach shows that none is lost.
    stage = Stage(campaign, "f21", lease_ms=4_000, max_deliveries=20, **CALM)
    greedy: dict[str, Any] = {"mode": "receive", "forgotten": 1.0, "work_ms": 300, "max_in_flight": 5_000, "size": 500}
    stage.tracked()
    stage.send(rate=0, count=campaign.times(6_000, least=2 * MANY)).join()
    for number in range(campaign.times(4, least=2)):
        what = "kill -9" if number % 2 else "clean stop"
        worker = stage.worker("greedy", **greedy)
        if not worker.until(partial(_holds, worker, MANY), HOLD_TIMEOUT_S * stage.patience):
            stage.fail(f"a consumer that was to hold {MANY} messages holds {worker.held()} before its {what}")
        (worker.kill if number % 2 else worker.stop)()
        stage.injected(f"{what} while thousands are held", held=worker.held())
    stage.drain(workers=3)
    if letters := stage.dump().dead_letters:
        stage.fail(f"I5: {len(letters)} messages that no handler failed on are dead letters")
    return stage


def _holds(worker: Worker, count: int) -> bool:
    return worker.held() >= count


def storm(campaign: Campaign) -> Stage:
    """F23: consumers that come and go."""
    stage = Stage(campaign, "f23")
    stage.judge(stall_ms=STALL_MS)
    stage.tracked()
    stage.send(rate=campaign.rate(150))
    crew = [stage.worker("stays"), stage.worker("storm")]
    for _ in range(campaign.times(15, least=3)):
        crew.append(stage.worker("storm"))
        stage.injected("consumer came")
        time.sleep(0.7)
        crew.pop(1).stop()
        stage.injected("consumer went")
    stage.drain()
    return stage


def poisoned(campaign: Campaign) -> Stage:
    """F22: a fifth of all messages raises in every handler and ends as dead letters; the others keep their rate."""
    stage = Stage(campaign, "f22", raised=0.0, rejected=0.0, slow=0.0, work_ms=5)
    stage.tracked()
    stage.send(rate=0, count=WARM_UP).join()
    stage.worker("calm", poison=0.0).wait_working(WARM_UP, 30 * stage.patience)
    rates = [_rate_of_good(stage, GOOD_RATE)]
    for worker in stage.workers:
        worker.stop()
    stage.send(rate=0, count=WARM_UP).join()
    stage.worker("eats", poison=POISON).wait_working(WARM_UP, 30 * stage.patience)
    for _ in range(campaign.times(2)):
        rates.append(_rate_of_good(stage, GOOD_RATE / (1 - POISON)))
        stage.injected("poison flood", messages=round(GOOD_RATE * RATE_S * POISON))
    stage.notes.append(f"good messages a second, before and in each flood: {[round(rate, 1) for rate in rates]}")
    if min(rates[1:]) < GOOD_SHARE * rates[0]:
        stage.fail(f"I8: good messages kept {min(rates[1:]) / rates[0]:.0%} of their rate, at least 80 %")
    stage.drain()
    return stage


def murdered(campaign: Campaign) -> Stage:
    """F22: messages that kill the process that handles them end as dead letters, and hold up no other message."""
    stage = Stage(campaign, "f22-killers", max_deliveries=4, isolate_after=2, kills_every=KILLS_EVERY, **CALM)
    stage.tracked()
    stage.send(rate=0, count=campaign.times(400, least=200)).join()
    give_up_s, killers = time.monotonic() + KILLERS_TIMEOUT_S * stage.patience, set[str]()
    while stage.open() and time.monotonic() < give_up_s:
        worker = stage.worker("dies")
        while worker.wait(1.0) is None and stage.open():
            pass
        for event in worker.events("killed"):
            worker.is_ended_by_us = True
            killers.add(event["id"])
            stage.injected("kill -9 by a message")
    stage.drain()
    if (dead := {letter.id for letter in stage.dump().dead_letters}) != killers:
        stage.fail(
            f"I5: {len(dead)} dead letters, {len(killers)} messages killed their process, {len(dead ^ killers)} differ"
        )
    return stage


def _rate_of_good(stage: Stage, rate: float) -> float:
    """Send for a while, and return how many messages a second were handled from the first to the last that was sent."""
    began_s = time.monotonic()
    stage.send(rate=rate, count=round(rate * RATE_S)).join()
    # What is behind by the time that the last one was sent is behind.
    time.sleep(1)
    took_s = time.monotonic() - began_s
    return len({event["id"] for event in read_events(stage.folder) if _is_handled_since(event, began_s)}) / took_s


def _is_handled_since(event: Mapping[str, Any], since_s: float) -> bool:
    return event["event"] == "handled" and float(event["monotonic"]) >= since_s


def _in_slots(jobs: Sequence[Job], work: Callable[[Job], None]) -> None:
    """Do the jobs in one thread for each slot."""
    waiting, lock = list(jobs), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                job = waiting.pop()
            work(job)

    threads = [threading.Thread(target=run) for _ in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
