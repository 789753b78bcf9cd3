"""The judge of coordination groups finds each violation that is seeded."""

from __future__ import annotations

from faults.claims import (
    Act,
    Disturbance,
    Handed,
    Kill,
    Logged,
    bad_grants,
    holdings_of,
    late_repeats,
    missing,
    orphans,
    overlaps,
    repeats,
    takeovers_ms,
    undisturbed,
)
from kmq_spark.core.coordination.records import Record, RecordType

T = 1_000
JOIN, HEARTBEAT, CLAIM, RELEASE = RecordType.JOIN, RecordType.HEARTBEAT, RecordType.CLAIM, RecordType.RELEASE
Row = tuple[int, int, RecordType, str, str, int]
"""Offset, append time, type, client id, resource, epoch."""


def acts(process: str, epoch: int, first_ms: float, last_ms: float, resource: str = "r") -> list[Act]:
    """Return the first and the last act of a process under an epoch."""
    return [Act(first_ms, resource, epoch, process), Act(last_ms, resource, epoch, process)]


def log_of(*rows: Row) -> dict[int, Logged]:
    """Return a log; an instance per client id."""
    return {
        offset: Logged(offset, at_ms, Record(kind, client_id, f"{client_id}!", resource=resource, epoch=epoch))
        for offset, at_ms, kind, client_id, resource, epoch in rows
    }


def test_acts_one_after_the_other_are_no_violation() -> None:
    holdings = holdings_of([*acts("a-1", 10, 0, 500), *acts("b-2", 20, 501, 900), *acts("c-3", 5, 0, 9, "other")])
    assert list(overlaps(holdings)) == []


def test_two_owners_at_a_time_are_found() -> None:
    (found,) = overlaps(holdings_of([*acts("a-1", 10, 0, 500), *acts("b-2", 20, 499, 900)]))
    assert found.what == "r: b-2 acted under epoch 20 1 ms before a-1 ended under epoch 10"


def test_epoch_of_two_processes_is_found() -> None:
    (found,) = overlaps(holdings_of([*acts("a-1", 10, 0, 500), *acts("b-2", 10, 600, 900)]))
    assert "epoch 10 was used by a-1 and by b-2" in found.what


def test_older_epoch_that_acts_later_is_found() -> None:
    """Epochs only rise."""
    assert list(overlaps(holdings_of([*acts("a-1", 20, 0, 500), *acts("b-2", 10, 600, 900)])))


def test_epoch_that_is_no_claim_of_the_member_is_found() -> None:
    holdings = holdings_of(acts("a-1", 10, 0, 1))
    good = log_of((10, 0, CLAIM, "a", "r", 0))
    assert list(bad_grants(holdings, good, T)) == []
    for bad in (
        log_of((11, 0, CLAIM, "a", "r", 0)),
        log_of((10, 0, HEARTBEAT, "a", "r", 0)),
        log_of((10, 0, CLAIM, "b", "r", 0)),
        log_of((10, 0, CLAIM, "a", "s", 0)),
    ):
        (found,) = bad_grants(holdings, bad, T)
        assert found.invariant == "C2"


def test_claim_that_passes_on_too_early_is_found() -> None:
    """After 2T of silence, or a release, it is right; 2T after the claim with a renewal between it is not."""
    holdings = holdings_of([*acts("a-1", 10, 0, 500), *acts("b-2", 20, 600, 900)])
    claimed, renewed = (10, 0, CLAIM, "a", "r", 0), (12, 500, HEARTBEAT, "a", "", 0)

    def found(*rows: Row) -> list[str]:
        return [each.what for each in bad_grants(holdings, log_of(claimed, *rows), T)]

    assert found((20, 2_001, CLAIM, "b", "r", 0)) == []
    assert found(renewed, (20, 2_501, CLAIM, "b", "r", 0)) == []
    assert found(renewed, (15, 600, RELEASE, "a", "r", 10), (20, 700, CLAIM, "b", "r", 0)) == []
    # A heartbeat behind the lapse renews nothing.
    assert found(renewed, (19, 2_600, HEARTBEAT, "a", "", 0), (20, 2_700, CLAIM, "b", "r", 0)) == []
    for rows in (
        [(20, 2_000, CLAIM, "b", "r", 0)],
        [renewed, (20, 2_500, CLAIM, "b", "r", 0)],
        [renewed, (15, 600, RELEASE, "a", "r", 9), (20, 700, CLAIM, "b", "r", 0)],
        [renewed, (15, 600, RELEASE, "a", "s", 10), (20, 700, CLAIM, "b", "r", 0)],
        [(15, 100, JOIN, "c", "", 0), (20, 700, CLAIM, "b", "r", 0)],
    ):
        (text,) = found(*rows)
        assert text.startswith("b-2 was granted r")


def test_claim_is_renewed_by_another_claim_only_if_that_was_granted() -> None:
    """A process acts under a claim that was granted; under a refused one it does not."""
    passed_on = [*acts("a-1", 10, 0, 500), *acts("b-2", 20, 600, 900)]
    log = log_of((10, 0, CLAIM, "a", "r", 0), (12, 500, CLAIM, "a", "s", 0), (20, 2_001, CLAIM, "b", "r", 0))
    assert list(bad_grants(holdings_of(passed_on), log, T)) == []
    ((_, text),) = bad_grants(holdings_of([*passed_on, *acts("a-1", 12, 510, 520, "s")]), log, T)
    assert text.startswith("b-2 was granted r")


def test_takeover_is_measured_from_the_kill() -> None:
    """What the process had lost before it was killed does not count."""
    holdings = holdings_of([*acts("a-1", 10, 0, 990), *acts("b-2", 20, 3_500, 3_600)])
    assert takeovers_ms(holdings, [Kill(1_000, "a-1")], held_within_ms=200) == [2_500]
    assert takeovers_ms(holdings, [Kill(1_200, "a-1")], held_within_ms=200) == []
    assert takeovers_ms(holdings, [Kill(1_000, "b-2")], held_within_ms=200) == []


def test_resource_that_no_process_takes_after_a_kill_is_found() -> None:
    """Not what another process has acted on, and not what the killed one had lost before."""
    holdings = holdings_of([*acts("a-1", 10, 0, 990), *acts("b-2", 20, 3_500, 3_600), *acts("a-1", 11, 0, 990, "s")])
    assert [each.what for each in orphans(holdings, [Kill(1_000, "a-1")], held_within_ms=200)] == [
        "s: no process has acted on it since a-1 was killed"
    ]
    assert list(orphans(holdings, [Kill(1_200, "a-1")], held_within_ms=200)) == []
    assert list(orphans(holdings, [], held_within_ms=200)) == []


def test_takeover_is_judged_where_the_broker_was_there_until_the_bound() -> None:
    """A kill before, within and behind a time without a leader, and one whose bound ends as it begins."""
    kills = [Kill(at_ms, f"a-{at_ms}") for at_ms in (1_000, 2_000, 3_500, 5_001)]
    assert undisturbed(kills, [Disturbance(3_000, 5_000)], within_ms=1_000) == [kills[0], kills[3]]
    assert undisturbed(kills, [], within_ms=1_000) == kills


def test_messages_lost_and_handed_out_again_are_found() -> None:
    handed = [Handed(0, 0, 0, 5, "a-1"), Handed(10, 0, 1, 5, "a-1"), Handed(900, 0, 1, 9, "b-2")]
    assert missing(handed, {0: 3, 1: 1}) == 2
    assert [one.process for one in repeats(handed)[0, 1]] == ["a-1", "b-2"]
    assert list(late_repeats(handed, within_ms=T)) == []
    long_before = [*handed, Handed(1_500, 0, 0, 5, "a-1"), Handed(2_000, 0, 0, 9, "b-2")]
    assert any(
        "0:1 came again; a-1 handed it out 1490 ms before its end" in found.what
        for found in late_repeats(long_before, T)
    )
