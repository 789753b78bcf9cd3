"""What `make bench-guard` compares, and what it measures for that."""

from __future__ import annotations

from typing import Any

from bench.ratios import KINDS, RATIOS, Case, Ratio, cases_for, ratios, together


def case_of(size: int, consumers: int, **medians: tuple[int, float]) -> dict[str, Any]:
    """Return a case as results.json has it: each contender's messages a second and its CPU a message."""
    return {
        "bytes": size,
        "consumers": consumers,
        "per_s": {kind: {"median": per_s} for kind, (per_s, _) in medians.items()},
        "cpu_us_per_message": {kind: {"client": 0.1, "sum": cpu} for kind, (_, cpu) in medians.items()},
    }


def test_each_ratio_is_that_of_two_medians_of_its_own_case() -> None:
    cases = [
        case_of(100, 1, plain=(1_000, 1.0), share=(500, 2.0), ack=(400, 4.0), batch=(700, 1.5), run=(300, 5.0)),
        case_of(100, 4, share=(900, 2.0), batch=(990, 9.0)),
        case_of(1_024, 1, share=(200, 2.0), ack=(260, 3.0), batch=(340, 3.0)),
    ]
    assert ratios(cases) == {
        "batch_vs_share_consumer": 1.4,
        "batch_vs_share_consumer_1k": 1.7,
        "batch_vs_share_consumer_four": 1.1,
        "batch_vs_plain": 0.7,
        "ack_vs_share_consumer": 0.8,
        "ack_vs_share_consumer_1k": 1.3,
        "ack_vs_plain": 0.4,
        "run_vs_plain": 0.3,
        "batch_cpu_vs_share_consumer": 0.75,
    }


def test_a_lower_rate_is_worse() -> None:
    ratio = Ratio("batch", "share")
    assert [ratio.has_fallen(1.0, now) for now in (0.79, 0.81, 2.0)] == [True, False, False]


def test_more_cpu_is_worse() -> None:
    ratio = Ratio("batch", "share", is_cpu=True)
    assert [ratio.has_fallen(1.0, now) for now in (0.1, 1.24, 1.26)] == [False, False, True]


def test_the_guard_measures_no_contender_that_its_ratios_do_not_need() -> None:
    assert cases_for(["batch_vs_share_consumer_1k", "ack_vs_share_consumer_1k", "batch_vs_share_consumer_four"]) == [
        Case(1_024, 1, ("share", "ack", "batch")),
        Case(100, 4, ("share", "batch")),
    ]
    assert cases_for(RATIOS) == [
        Case(100, 1, KINDS),
        Case(1_024, 1, ("share", "ack", "batch")),
        Case(100, 4, ("share", "batch")),
    ]


def test_a_run_of_some_parts_keeps_the_others() -> None:
    before: dict[str, Any] = {
        "measured_on": {"throughput": "then", "latency": "then"},
        "took_s": {"latency": 7},
        "latency": "measured then",
        "throughput": [
            case_of(100, 1, share=(500, 2.0), ack=(400, 4.0)),
            case_of(10_240, 1, share=(50, 2.0)),
            case_of(100, 4, share=(900, 2.0), batch=(450, 9.0)),
        ],
        "ratios": {"ack_vs_share_consumer": 0.8, "batch_vs_share_consumer_four": 0.5},
    }
    new: dict[str, Any] = {
        "measured_on": {"throughput": "now"},
        "took_s": {"throughput": 9},
        "throughput": [case_of(100, 1, share=(500, 2.0), ack=(600, 3.0))],
    }
    assert together(before, new) == {
        "measured_on": {"throughput": "now", "latency": "then"},
        "took_s": {"throughput": 9, "latency": 7},
        "latency": "measured then",
        "throughput": [new["throughput"][0], *before["throughput"][1:]],
        "ratios": {"ack_vs_share_consumer": 1.2, "batch_vs_share_consumer_four": 0.5},
    }
