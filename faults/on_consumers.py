"""Faults of consumers: killed at every step and in between, paused, coming and going, with false clocks."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from faults.clocks import FalseClock, is_available
from faults.events import read_events
from faults.mix import WAYS
from faults.once import TRANSACTION
from faults.topics import read_dump
from kmq_spark.failpoints import EXIT_CODE, FAILPOINTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from faults.campaign import Campaign
    from faults.processes import WorkerChild
    from faults.stage import Stage

Job = TypeVar("Job")

HOUR_MS = 3_600_000

INTERRUPTS_TIMEOUT_S = 90.0

STALL_MS = 10_000
"""I9: messages of a partition do not wait longer than this without any being taken."""

FEW = 40
"""Messages held at once by consumers that are to be full most of the time, and pause their partitions."""

MANY, HOLD_TIMEOUT_S = 2_000, 30.0
"""Messages that F21's consumers hold at least, and how long they may take to get them."""

GREEDY: dict[str, Any] = {
    "mode": "receive",
    "forgotten": 1.0,
    "work_ms": 300,
    "max_in_flight": 5_000,
    "max_batch": 500,
}
"""A consumer that takes what it gets and settles nothing."""

POISON, WARM_UP = 0.2, 20
GOOD_RATE, RATE_S, GOOD_SHARE = 60.0, 12.0, 0.8
"""F22: good messages a second that are sent; for how long; the share of the calm rate that they must keep."""

SLOTS = 2
"""Victims at a time."""

UNPASSED = ("consumer.extension-sent", "consumer.revoked")
"""Points that no worker of the campaign passes for certain; tests/kafka passes them."""

CONSUMER_POINTS = tuple(name for name in FAILPOINTS if name.startswith("consumer.") and name not in UNPASSED)

WAY_TO = {"consumer.tx-": "transaction"}
"""How a worker works that passes points of these names; the others are passed by the defaults."""

POINT_TIMEOUT_S = 30.0
"""For a crash point to be passed; it takes seconds on an idle machine."""

TRANSACTION_S = 8.0
"""A consumer that dies in a transaction holds its markers partitions up until the broker has given that up."""


def killed(campaign: Campaign) -> Stage:
    """F1: `kill -9` of consumers, at every crash point and at random."""
    stage = campaign.stage("f1", is_mixed=True, rejected=0.01, slow=0.005)
    random_kills = campaign.scaled(60, least=2)
    jobs: list[tuple[str, int]] = [
        (point, nth) for point in CONSUMER_POINTS for nth in campaign.picked((1, 2, 5, 9), 4, least=1)
    ] + [("", number) for number in range(random_kills)]
    random.Random(stage.seed).shuffle(jobs)  # noqa: S311  # repeatable
    with stage.tracking():
        stage.send(rate=campaign.rate(120))
        # No suspects for these: what a victim had alone must not wait for its turn at the end.
        stage.crew("healthy", threads=8, max_in_flight=1_000)
        _in_slots(jobs, lambda job: _kill_one(stage, *job))
        stage.must_have_passed(CONSUMER_POINTS)
        stage.drain()
    return stage


def _kill_one(stage: Stage, point: str, number: int) -> None:
    if point:
        name_of_way = next((way for begin, way in WAY_TO.items() if point.startswith(begin)), "defaults")
        way = WAYS[name_of_way]
        name = f"victim-{point}-{number}-{time.time_ns()}"
        worker = stage.worker(name, failpoint=f"{point}:{number}", **way)
        if worker.wait(POINT_TIMEOUT_S * stage.patience) == EXIT_CODE:
            _note_transaction(stage, way)
            stage.injected("crash point", point=point, nth=number)
            return
        stage.notes.append(f"{point}:{number} was not passed in time")
        worker.kill()
        return
    assert stage.mix is not None
    way = stage.mix.way()
    worker = stage.worker(f"victim-random-{number}", **way)
    is_working = worker.wait_working(1 + number % 40, 15 * stage.patience)
    worker.kill()
    _note_transaction(stage, way)
    if is_working:
        stage.injected("kill -9", deliveries=number % 40)
    else:
        stage.notes.append(f"random victim {number} got no messages in time")


def _note_transaction(stage: Stage, way: Mapping[str, Any]) -> None:
    if way.get("mode") == TRANSACTION:
        stage.held_up(TRANSACTION_S)


def paused(campaign: Campaign) -> Stage:
    """F4: SIGSTOP of consumers for longer than a lease, their late ENDs included."""
    stage = campaign.stage("f4-consumers")
    stage.judge(stall_ms=STALL_MS)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        crew = [stage.worker(f"paused-{number}", max_in_flight=FEW) for number in range(4)]
        for worker in crew:
            worker.wait_working()
        for number in range(campaign.scaled(24, least=2)):
            victims = [crew[number % 4], crew[(number + 1) % 4]]
            with stage.away():
                for worker in victims:
                    worker.pause()
                time.sleep((0.5, 2.5, 3.5)[number % 3])
                for worker in victims:
                    worker.resume()
                    stage.injected("SIGSTOP", seconds=(0.5, 2.5, 3.5)[number % 3])
            time.sleep(0.4)
        stage.drain()
    return stage


def skewed(campaign: Campaign) -> Stage | None:
    """F10: consumers whose clock is an hour off, steps, or drifts."""
    if not is_available():
        return None
    stage = campaign.stage("f10-consumers")
    clocks = (
        *(FalseClock(HOUR_MS), FalseClock(-HOUR_MS), FalseClock(24 * HOUR_MS), FalseClock(rate_ppm=500)),
        *(FalseClock(rate_ppm=-500), FalseClock(0, 0, 3_000, HOUR_MS), FalseClock(0, 0, 3_000, -600_000)),
    )
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        stage.worker("healthy")
        jobs = [(clock, number) for number in range(campaign.scaled(2, least=1)) for clock in clocks]
        _in_slots(jobs, lambda job: _skew_one(stage, *job))
        stage.drain()
    return stage


def _skew_one(stage: Stage, clock: FalseClock, number: int) -> None:
    worker = stage.worker("skewed-" + "-".join(map(str, (*clock, number))), clock=clock)
    if worker.wait_working(20):
        stage.injected("clock", clock=list(clock))
    else:
        stage.fail(f"I9: a consumer with the clock {clock} got no messages")
    # Beyond the step, where there is one.
    time.sleep(3)
    worker.kill()


def holding_many(campaign: Campaign) -> Stage:
    """F21: kill a consumer that holds thousands, and one that stops cleanly."""
    # A killed one's messages count as silent deliveries: only a limit that they cannot reach shows that none is lost.
    stage = campaign.stage("f21", lease_ms=4_000, max_deliveries=20, raised=0.0, rejected=0.0, poison=0.0, slow=0.0)
    with stage.tracking():
        stage.send(rate=0, count=campaign.scaled(6_000, least=2 * MANY)).join()
        for number in range(campaign.scaled(8, least=2)):
            what = "kill -9" if number % 2 else "clean stop"
            worker = stage.worker(f"greedy-{number}", **GREEDY)
            if not worker.wait_holding(MANY, HOLD_TIMEOUT_S * stage.patience):
                stage.fail(f"a consumer that was to hold {MANY} messages holds {worker.held_count()} before its {what}")
            (worker.kill if number % 2 else worker.stop)()
            stage.injected(f"{what} while thousands are held", held=worker.held_count())
        stage.drain(workers=3)
    if letters := read_dump(stage.queue, stage.bootstrap_servers).dead_letters:
        stage.fail(f"I5: {len(letters)} messages that no handler failed on are dead letters")
    return stage


def storm(campaign: Campaign) -> Stage:
    """F23: consumers that come and go."""
    stage = campaign.stage("f23")
    stage.judge(stall_ms=STALL_MS)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        crew = [stage.worker("stays"), stage.worker("storm-first")]
        for number in range(campaign.scaled(20, least=3)):
            crew.append(stage.worker(f"storm-{number}"))
            stage.injected("consumer came")
            time.sleep(0.7)
            crew.pop(1).stop()
            stage.injected("consumer went")
        stage.drain()
    return stage


def poisoned(campaign: Campaign) -> Stage:
    """F22: a fifth of all messages raises in every handler and ends as dead letters; the others keep their rate."""
    stage = campaign.stage("f22", raised=0.0, rejected=0.0, slow=0.0, work_ms=5)
    with stage.tracking():
        stage.send(rate=0, count=WARM_UP).join()
        stage.worker("calm", poison=0.0).wait_working(WARM_UP, 30 * stage.patience)
        rates = [_rate_of_good(stage, GOOD_RATE)]
        for worker in stage.workers:
            worker.stop()
        stage.send(rate=0, count=WARM_UP).join()
        stage.worker("eats", poison=POISON).wait_working(WARM_UP, 30 * stage.patience)
        for _ in range(campaign.scaled(3, least=1)):
            rates.append(_rate_of_good(stage, GOOD_RATE / (1 - POISON)))
            stage.injected("poison flood", messages=round(GOOD_RATE * RATE_S * POISON))
        stage.notes.append(f"good messages a second, before and in each flood: {[round(rate, 1) for rate in rates]}")
        if min(rates[1:]) < GOOD_SHARE * rates[0]:
            stage.fail(f"I8: good messages kept {min(rates[1:]) / rates[0]:.0%} of their rate, at least 80 %")
        stage.drain()
    return stage


def _rate_of_good(stage: Stage, rate: float) -> float:
    """Send for a while, and return how many messages a second were handled from the first to the last that was sent."""
    began_s = time.monotonic()
    stage.send(rate=rate, count=round(rate * RATE_S)).join()
    # What is behind by the time that the last one was sent is behind.
    time.sleep(1)
    took_s = time.monotonic() - began_s
    handled = {event["id"] for event in read_events(stage.folder) if _is_handled_since(event, began_s)}
    return len(handled) / took_s


def _is_handled_since(event: Mapping[str, Any], since_s: float) -> bool:
    return event["event"] == "handled" and float(event["monotonic"]) >= since_s


def interrupted(campaign: Campaign) -> Stage:
    """F26: KeyboardInterrupt and a signal handler's exception at random moments of a loop of `receive` calls."""
    # What an interrupt takes out of a loop's hands between `receive` and the next line comes again after its lease.
    stage = campaign.stage(
        "f26", mode="interrupted", keep_alive=False, max_deliveries=0, max_in_flight=50, raised=0.0, poison=0.0
    )
    stage.judge(stall_ms=STALL_MS)
    wanted = campaign.scaled(60, least=10)
    with stage.tracking():
        stage.send(rate=campaign.rate(150))
        crew = [stage.worker(f"torn-{number}", seed=stage.seed + number) for number in range(2)]
        give_up_s = time.monotonic() + INTERRUPTS_TIMEOUT_S * stage.patience
        while (torn := _interrupts(crew)) < wanted and time.monotonic() < give_up_s:
            time.sleep(0.5)
        for number in range(2):
            stage.worker(f"calm-{number}", mode="run", keep_alive=True).wait_working()
        for worker in crew:
            if worker.stop():
                stage.fail(f"I9: {worker.name} ended with {worker.exit_code}: {worker.last_words()}")
        for _ in range(min(torn, wanted)):
            stage.injected("interrupt")
        stage.drain()
    return stage


def _interrupts(crew: Sequence[WorkerChild]) -> int:
    return sum(event["event"] == "interrupted" for worker in crew for event in worker.events())


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
