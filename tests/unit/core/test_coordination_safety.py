"""
Never two holders of a resource within their own T, whatever members, records and clocks do.

Each simulated member has the real fold, the real `Holds` and nothing else.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kmq_spark.core.coordination.holds import NEVER_HELD, Holds
from kmq_spark.core.coordination.leader import changes
from kmq_spark.core.coordination.records import Record, RecordType
from tests.examples import examples
from tests.unit.coordination_sim import Process, Simulation, T

CLIENTS, RESOURCES = ["a", "b", "c"], ["r", "t"]
JUMPS_MS = st.sampled_from([0, 0, 0, -3_600_000, -5 * T, -T, T, 5 * T, 3_600_000])
ANY_CLIENT, ANY_RESOURCE = st.sampled_from(CLIENTS), st.sampled_from(RESOURCES)


class Group(RuleBasedStateMachine):
    """Three members, a resource and a task; crashes, suspensions of up to 5T, delays of any length, pauses, clocks."""

    @initialize()
    def begin(self) -> None:
        """All of them join, one holds the resource, and a task is assigned."""
        self.simulation = Simulation()
        self.jumped_at_ms = -3.0 * T
        self.simulation.append(Record(RecordType.ADD_TASK, "operator", "o", resource="t"))
        for client_id in CLIENTS:
            self.simulation.settle(self.simulation.start(client_id))
        first = self.simulation.running["a"]
        for process in self.simulation.running.values():
            self.simulation.read(process)
        self.claim("a", "r")
        self.assign("a")
        self.simulation.settle(first)

    def process(self, client_id: str) -> Process:
        """Return the newest instance of a client id."""
        return self.simulation.running[client_id]

    @rule(passed_ms=st.sampled_from([1, T // 4, T // 2, T, 2 * T, 5 * T]))
    def pass_time(self, passed_ms: int) -> None:
        """Everybody is suspended for a while; their clocks run."""
        self.simulation.now_ms += passed_ms

    @rule(
        client_ids=st.sets(ANY_CLIENT, min_size=1),
        rounds=st.integers(1, 12),
        step_ms=st.sampled_from([T // 10, T // 3]),
        resource=st.sampled_from(["", "r", "r", "t"]),
        jump_ms=JUMPS_MS,
    )
    def live(self, client_ids: set[str], rounds: int, step_ms: int, resource: str, jump_ms: int) -> None:
        """
        Some do for up to 4T what clients do: join where they are no members, heartbeat, claim. Others are suspended.

        Before that the broker's clock is set, or the leader moves to a broker with another clock; once in 3T at most.
        """
        if self.simulation.now_ms >= self.jumped_at_ms + 3 * T and jump_ms:
            self.jumped_at_ms = self.simulation.now_ms
            self.simulation.broker_ahead_ms += jump_ms
        for _ in range(rounds):
            self.simulation.now_ms += step_ms
            for client_id in sorted(client_ids):
                self.take_turn(self.process(client_id), resource)

    def take_turn(self, process: Process, resource: str) -> None:
        """Let a process do what a client does every T/3."""
        self.simulation.read(process)
        is_member = process.client_id in process.world.members
        kind = RecordType.HEARTBEAT if is_member else RecordType.JOIN
        self.simulation.send(process, kind, heartbeat_ms=T)
        if resource and process.claimed(resource) is None:
            self.claim(process.client_id, resource)
        self.simulation.settle(process)

    @rule(client_id=ANY_CLIENT)
    def heartbeat(self, client_id: str) -> None:
        """A member sends a heartbeat; it is appended later."""
        self.simulation.send(self.process(client_id), RecordType.HEARTBEAT)

    @rule(client_id=ANY_CLIENT, resource=ANY_RESOURCE)
    def claim(self, client_id: str, resource: str) -> None:
        """A member claims, whatever it knows."""
        self.simulation.send(self.process(client_id), RecordType.CLAIM, resource=resource)

    @rule(client_id=ANY_CLIENT, resource=ANY_RESOURCE)
    def release(self, client_id: str, resource: str) -> None:
        """A member stops, and releases what it holds by what it has read."""
        process = self.process(client_id)
        epoch = process.claimed(resource)
        # A member that releases does not act on the resource again under that epoch: it stops before it sends.
        if epoch is not None:
            self.simulation.send(process, RecordType.RELEASE, resource=resource, epoch=epoch)
            self.simulation.settle(process)

    @rule(client_id=ANY_CLIENT)
    def assign(self, client_id: str) -> None:
        """A member assigns, if it believes to be the leader; else it does what it can."""
        process = self.process(client_id)
        wanted = tuple(changes(process.world))
        generation = max(0, process.world.generation)
        self.simulation.send(process, RecordType.ASSIGN, generation=generation, assignments=wanted)

    @rule(client_id=ANY_CLIENT, count=st.integers(1, 3))
    def deliver(self, client_id: str, count: int) -> None:
        """What was sent is appended, even if its process is suspended or dead."""
        self.simulation.deliver(self.process(client_id), count)
        for process in self.simulation.gone:
            if process.client_id == client_id:
                self.simulation.deliver(process, count)

    @rule(client_id=ANY_CLIENT, count=st.integers(1, 6))
    def read(self, client_id: str, count: int) -> None:
        """A member reads on."""
        self.simulation.read(self.process(client_id), count)

    @rule(client_id=ANY_CLIENT, fast_reclaim=st.booleans())
    def kill_and_restart(self, client_id: str, fast_reclaim: bool) -> None:  # noqa: FBT001  # a drawn value
        """A new instance with the same id; the user's promise that the first is gone is kept."""
        self.process(client_id).is_dead = True
        self.simulation.start(client_id, fast_reclaim=fast_reclaim)

    @rule(kind=st.sampled_from([RecordType.PAUSE_GROUP, RecordType.RESUME_GROUP]), pause=st.sampled_from([T, 5 * T]))
    def operate(self, kind: RecordType, pause: int) -> None:
        """An operator pauses the group, or resumes it."""
        self.simulation.append(Record(kind, "operator", "o", duration_ms=pause))

    @invariant()
    def there_is_one_owner(self) -> None:
        """At this instant, by the members' own clocks and worlds."""
        if hasattr(self, "simulation"):
            for resource in RESOURCES:
                assert len(self.simulation.owners(resource)) <= 1


Group.TestCase.settings = settings(max_examples=examples(3), stateful_step_count=40, deadline=None)
TestGroup = Group.TestCase


# Small worlds, exhaustively.


def play(path: tuple[str, ...], *, held: bool) -> Simulation | None:
    """Play a sequence of steps of two members; None where the last one does nothing: a shorter sequence shows it."""
    simulation = Simulation()
    for client_id in ("a", "b"):
        simulation.settle(simulation.start(client_id))
    first, second = simulation.running.values()
    simulation.read(first)
    if held:
        simulation.claim(first)
        simulation.live(second, 3, int(0.3 * T))
        # Sent in time, and on its way for as long as the path says.
        simulation.send(first, RecordType.HEARTBEAT)
    is_anything = True
    for step in path:
        is_anything = _step(simulation, step, (0.6 if held else 1.1) * T)
    return simulation if is_anything else None


def _step(simulation: Simulation, step: str, passed_ms: float) -> bool:
    """Take a step; return whether it does anything."""
    if step == "time":
        # With records of another group, so that the group's clock moves.
        for _ in range(3):
            simulation.now_ms += passed_ms / 3
            simulation.append(None)
        return True
    process = simulation.running[step[0]]
    if step[1:] == "+":
        if process.client_id not in process.world.members:
            simulation.send(process, RecordType.JOIN, heartbeat_ms=T)
        elif process.claimed("r") is None:
            simulation.send(process, RecordType.CLAIM, resource="r")
        else:
            simulation.send(process, RecordType.HEARTBEAT)
        return True
    if step[1:] == ">":
        is_anything = bool(process.on_the_way)
        simulation.deliver(process)
        return is_anything
    is_anything = process.world.next_offset < len(simulation.log)
    simulation.read(process)
    return is_anything


STEPS = ("time", "a+", "a>", "a<", "b+", "b>", "b<")
"""Time passes; a member sends what its world asks for (JOIN, CLAIM or HEARTBEAT), it is appended, the member reads."""


@pytest.mark.parametrize("held", [False, True])
def test_two_members_and_one_resource_in_every_interleaving_of_six_steps(held: bool) -> None:  # noqa: FBT001
    """
    At no step two owners; epochs rise; all who read to the end have the same world (`Simulation` looks).

    Interleavings that lead to the same state have the same futures: one of them is played on.
    """
    known, owners = set(), set()
    shorter: list[tuple[str, ...]] = [()]
    for _ in range(6):
        longer = []
        for path in itertools.starmap(lambda path, step: (*path, step), itertools.product(shorter, STEPS)):
            simulation = play(path, held=held)
            if simulation is None or (state := simulation.state()) in known:
                continue
            known.add(state)
            longer.append(path)
            found = simulation.owners("r")
            assert len(found) <= 1, (path, found)
            owners |= {instance[0] for instance, _ in found}
        shorter = longer
    assert len(known) > 1_000
    # The paths reach what they are about: either member owns at some step.
    assert owners == {"a", "b"}


# Sequences of the documentation.


def test_heartbeat_that_is_appended_behind_the_claim_of_another_renews_nothing() -> None:
    """The broker acknowledges it, and its writer is no holder any more."""
    simulation = Simulation()
    first, second = simulation.start("a"), simulation.start("b")
    simulation.settle(first)
    simulation.settle(second)
    simulation.claim(first)
    simulation.live(second, 5)
    simulation.send(first, RecordType.HEARTBEAT)  # at 1.67 T, delayed
    simulation.live(second, 3)
    simulation.claim(second)
    simulation.deliver(first)
    sent_at_ms, acknowledged_until_ms = 5 * (T // 3), 5 * (T // 3) + T
    assert sent_at_ms + T < simulation.now_ms + T
    assert simulation.now_ms < acknowledged_until_ms + T
    simulation.read(first)
    assert [instance[0] for instance, _ in simulation.owners("r")] == ["b"]
    assert first.holds.until_ms(T) - first.clock_ahead_ms == T


def test_epoch_shows_who_came_later_where_a_promise_was_broken() -> None:
    """Fast reclaim of an instance that is alive: two owners for T at most, and the newer one has the larger epoch."""
    simulation = Simulation()
    first = simulation.start("a")
    simulation.settle(first)
    simulation.claim(first)
    first.is_dead = True  # for `start`; the user believes it
    second = simulation.start("a", fast_reclaim=True)
    first.is_dead = False
    simulation.settle(second)
    assert simulation.owners("r") == [(second.instance, 2), (first.instance, 1)]
    simulation.now_ms += T
    assert simulation.owners("r") == []
    simulation.live(second, 1)
    assert simulation.owners("r") == [(second.instance, 2)]
    simulation.read(first)
    assert first.claimed("r") is None


# The holder's side by itself.


def test_hold_lasts_from_the_sending_of_the_newest_renewal_that_was_read_back() -> None:
    """Later ones that were sent, and ones that renewed nothing, do not count."""
    holds = Holds()
    assert holds.until_ms(T) == NEVER_HELD
    for sequence, at_ms in enumerate([100.0, 200.0, 300.0, 400.0]):
        holds.note_sent(sequence, at_ms)
    holds.note_read(1, refreshed=True)
    assert holds.until_ms(T) == 1_200.0
    holds.note_read(2, refreshed=False)
    assert holds.until_ms(T) == 1_200.0
    holds.note_read(0, refreshed=True)
    holds.note_read(99, refreshed=True)
    assert holds.until_ms(T) == 1_200.0
