"""
The results of the benchmarks as tables: for docs/performance.md, and few for README.md.

Each table says when its figures were measured, because a run may measure some parts only. What no run has measured yet
is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.ratios import RATIOS, Case

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAMES = {
    "plain": "plain `consume`",
    "share": "share consumer, explicit",
    "batch": "ours, one `ack()` a batch",
    "ack": "ours, one `ack()` a message",
    "run": "ours, `run(handler)`",
}

CLASS_NAMES = {
    "client": "client",
    "broker": "broker",
    "spark": "Spark's JVM and driver",
    "workers": "Python workers",
    "sum": "sum",
}

PRODUCER_NAMES = {
    "plain": "plain idempotent producer",
    "ours": "`QueueProducer`",
    "resuming": "`ResumingProducer`, commits every 100 ms",
}

LATENCY_NAMES = NAMES | {"receive": "ours, `receive` and `ack()`"}

NONE = "\N{EN DASH}"
"""In place of a figure that was not measured."""

BEGIN = "<!-- Written by bench/report.py from bench/results.json: `.venv/bin/python -m bench.run --render`. -->"
END = "<!-- End of what bench/report.py writes. -->"


def with_figures(page: str, results: dict[str, Any]) -> str:
    """Return docs/performance.md with these figures between `BEGIN` and `END`; ValueError where it lacks a line."""
    lines = ['Thousands of messages a second, medians. "Ours" is measured with the tracker running beside it.', ""]
    lines += [*_throughput(results), "", *_ratios(results), *_cpu(results), *_producers(results["producers"]), ""]
    lines += _table(("what", "measured", "on"), _others(results))
    title = f"cost of a tracker's batch, {_day(results['measured_on']['tracker'])}"
    lines += ["", *_table((title, "measured"), _costs(results))]
    return _with(page, lines)


def with_summary(readme: str, results: dict[str, Any]) -> str:
    """Return README.md with the few figures that it shows."""
    return _with(readme, _table(("", "measured"), _summary(results)))


def _with(page: str, lines: list[str]) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"the page has no place for the figures: it needs the lines {BEGIN!r} and {END!r}"
        raise ValueError(message)
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}"


def _summary(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a reader of the README wants to know first."""
    (case,) = (each for each in results["throughput"] if (each["bytes"], each["consumers"]) == (100, 1))
    rate = {kind: f"{1_000 * round(spread['median'] / 1_000):,}" for kind, spread in case["per_s"].items()}
    others = f"share consumer {rate['share']}, plain `consume` {rate['plain']}"
    p95 = {kind: f"{spread['p95']:.1f} ms" for kind, spread in results["latency"]["ms"].items()}
    late, mass = results["lateness_by_rate"]["100"], results["mass_expiry"]
    late_ms = late["lateness_ms"]
    few, *_, many = (row for row in results["tracker"] if row["kind"] == "runs")
    memory = " / ".join(f"{row['rss_mib'] / 1024:.1f}" for row in (few, many))
    return [
        (
            "one consumer, 100 bytes: one `ack()` a message / one a batch",
            f"{rate['ack']} / {rate['batch']} a second; {others}",
        ),
        (
            f"from `send` to the handler at {results['latency']['per_s']:,} messages a second, 95th percentile",
            f"{p95['receive']}; plain consumer {p95['plain']}",
        ),
        (
            "redelivery after the deadline, at 100 expiries a second",
            f"{late_ms['p50']} ms (median), {late_ms['p99']} ms (99th percentile), {late['early']} early",
        ),
        (f"{mass['messages']:,} leases that run out at once", f"{mass['per_s']:,} messages redelivered a second"),
        (
            f"memory of the tracker with {few['in_flight']:,} / {many['in_flight']:,} messages in flight",
            f"{memory} GiB: driver, JVM and workers",
        ),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def _day(machine: str) -> str:
    """Return the date of `measured_on`."""
    return machine.rpartition(", ")[2]


def _throughput(results: dict[str, Any]) -> list[str]:
    """Return the table of the rates."""
    rows = [
        (
            f"{case['bytes']:,}",
            case["consumers"],
            *(f"{case['per_s'][kind]['median'] / 1000:,.0f}" for kind in NAMES),
            _day(case["measured_on"]),
        )
        for case in results["throughput"]
    ]
    return _table(("bytes", "processes", *NAMES.values(), "on"), rows)


def _ratios(results: dict[str, Any]) -> list[str]:
    """Return the table of the ratios that the guard compares."""
    rows = []
    for name, ratio in RATIOS.items():
        if name in results["ratios"]:
            goal = f"{'at most' if ratio.is_cpu else 'at least'} {ratio.goal}" if ratio.goal else NONE
            rows.append((f"`{name}`", results["ratios"][name], goal))
    title = [
        f"Ratios of these rates, or of the CPU, at {Case(100, 1)} unless the name ends in `_1k` or `_four`. *batch* is",
        "ours with one `ack()` a batch, *ack* with one a message, *run* with a handler:",
    ]
    return [*title, "", *_table(("ratio", "measured", "goal"), rows)]


def _cpu(results: dict[str, Any]) -> list[str]:
    """Return the CPU a message of the main case, by contender and class of processes."""
    (case,) = (each for each in results["throughput"] if (each["bytes"], each["consumers"]) == (100, 1))
    cpu = case["cpu_us_per_message"]
    rows = [
        (NAMES[kind], *(f"{cpu[kind][name]:.2f}" if name in cpu[kind] else NONE for name in CLASS_NAMES))
        for kind in NAMES
        if kind in cpu
    ]
    title = f"CPU of the whole system, µs a message, {Case(100, 1)}, {_day(case['measured_on'])}:"
    return ["", title, "", *_table(("contender", *CLASS_NAMES.values()), rows)]


def _producers(found: dict[str, Any]) -> list[str]:
    """Return the table of the producers: one row by size and producer."""
    rows = [
        (
            f"{case['bytes']:,}", name, f"{case['per_s'][kind] / 1000:,.0f}", case["vs_plain"].get(kind, 1.0),
            case["cpu_us"][kind],
        )
        for case in found["throughput"]
        for kind, name in PRODUCER_NAMES.items()
    ]  # fmt: skip
    late = [
        (name, found["latency"]["ms"][kind]["p50"], found["latency"]["ms"][kind]["p95"])
        for kind, name in PRODUCER_NAMES.items()
    ]
    return [
        "",
        *_table(("bytes", "producer", "thousand messages a second", "of plain", "CPU, µs a message"), rows),
        "",
        *_table(("from `send` to a reader of committed records", "p50, ms", "p95, ms"), late),
    ]


def _others(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what is one figure or a few: name, figures, date."""
    days = {part: _day(machine) for part, machine in results["measured_on"].items()}
    hand_over, mass = results["latency"], results["mass_expiry"]
    folded = mass["end_folded_ms"]
    poison = results["poison"]["ratios_to_the_same_stream"]
    p95 = "; ".join(f"{LATENCY_NAMES[kind]} {spread['p95']:.1f} ms" for kind, spread in hand_over["ms"].items())
    rows = [(f"`send` to handler at {hand_over['per_s']:,} messages a second, 95th percentile", p95, days["latency"])]
    late = results["lateness_by_rate"]
    rates = " / ".join(f"{int(rate):,}" for rate in late)
    p50, p99, longest = (
        " / ".join(str(each["lateness_ms"][name]) for each in late.values()) for name in ("p50", "p99", "max")
    )
    figures = f"p50 {p50}, p99 {p99}, at most {longest} ms; {sum(each['early'] for each in late.values())} early"
    rows.append((f"redelivery after its deadline, at {rates} expiries a second", figures, days["lateness"]))
    expiry = f"mass expiry: {mass['messages']:,} leases that run out at once"
    figures = f"{mass['per_s']:,} redelivered a second ({mass['rates'][0]:,} to {mass['rates'][-1]:,})"
    rows.append((expiry, f"{figures}, {mass['early']} early", days["mass_expiry"]))
    if folded:
        figures = f"after {folded['p50'] / 1000:.1f} s (p50), {folded['max'] / 1000:.1f} s at most"
        rows.append(("an ack during the mass expiry: read by the tracker", figures, days["mass_expiry"]))
    figures = f"{poison['raises']} where handlers raise, {poison['silent']} where deliveries end silently"
    rows.append(("rate of good messages among 20 % poison, to that without poison", figures, days["poison"]))
    return rows


def _costs(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the terms of the cost model."""
    ticks = {int(count): ms for count, ms in results["tick_ms_by_partitions"].items()}
    (few, *_, many), by_partitions = ticks, ", ".join(f"{count}: {ms} ms" for count, ms in ticks.items())
    each_ms = (ticks[many] - ticks[few]) / (many - few)
    model = f"{ticks[few] - few * each_ms:.0f} ms; {each_ms:.1f} ms a markers partition"
    rows = [
        ("a TICK in each markers partition, by their number", by_partitions),
        ("*fixed* and *partitions*, from the first and the last of these", model),
    ]
    for kind, lie in (("runs", "as consumers leave them"), ("scattered", "no two adjacent")):
        those = [row for row in results["tracker"] if row["kind"] == kind]
        counts, ms, gib, disk, events = (
            " / ".join(texts)
            for texts in zip(
                *(
                    (
                        f"{row['in_flight']:,}", str(row["tick_ms"]), f"{row['rss_mib'] / 1024:.1f}",
                        f"{row['state_bytes'] // 1000:,}", f"{row['events_per_s'] / 1e6:.1f}",
                    )
                    for row in those
                ),
                strict=True,
            )
        )  # fmt: skip
        rows += [
            (f"*in flight*: a TICK with {counts} messages, {lie}", f"{ms} ms"),
            ("the same: memory of driver, JVM and workers; state on disk", f"{gib} GiB; {disk} kB"),
            ("the same: million messages started or ended a second, beside them", events),
        ]
    redelivery = f"{1e6 / results['mass_expiry']['per_s']:.0f} µs a message"
    rows.append(("*redeliveries*, from the mass expiry", redelivery))
    return rows
