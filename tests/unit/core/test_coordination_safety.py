"""
Never two holders of a resource within their own T, whatever members, records and clocks do.

Each simulated member has the real fold, the real `Holds` and nothing else.
"""

from __future__ import annotations

import itertools

import pytest

from kmq_spark.core.coordination.holds import NEVER_HELD, Holds
from kmq_spark.core.coordination.records import RecordType
from tests.unit.coordination_sim import Simulation, T

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
