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
    "resuming": "`QueueProducer(producer_id=…)`, commits every 100 ms",
}

LATENCY_NAMES = NAMES | {"receive": "ours, `receive` and `ack()`"}

NONE = "\N{EN DASH}"
"""In place of a figure that was not measured."""

BEGIN = "<!-- Written by bench/report.py from bench/results.json: `.venv/bin/python -m bench.run --render`. -->"
END = "<!-- End of what bench/report.py writes. -->"


def with_figures(page: str, results: dict[str, Any]) -> str:
    """
    Return docs/performance.md with the figures of these results.

    Args:
        page: The page as it is. What lies between `BEGIN` and `END` is replaced.
        results: Those of results.json.

    Raises:
        ValueError: *page* does not have both lines.
    """
    lines = ['Thousands of messages a second, medians. "Ours" is measured with the tracker running beside it.', ""]
    lines += [*_throughput(results), "", *_ratios(results), *_cpu(results), *_producers(results["producers"]), ""]
    lines += _table(("what", "measured", "on"), _others(results))
    lines += ["", *_table(("cost of a tracker's batch", "measured", "on"), _costs(results))]
    return _with(page, lines)


def with_summary(readme: str, results: dict[str, Any]) -> str:
    """Return README.md with the few figures that it shows; arguments and errors as those of `with_figures`."""
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
    """Return the table of the rates; a contender that a case was measured without is a dash."""
    cases = results["throughput"]
    kinds = [kind for kind in NAMES if any(kind in case["per_s"] for case in cases)]
    rows = [
        (
            f"{case['bytes']:,}",
            case["consumers"],
            *(f"{case['per_s'][kind]['median'] / 1000:,.0f}" if kind in case["per_s"] else NONE for kind in kinds),
            _day(case["measured_on"]),
        )
        for case in cases
    ]
    return _table(("bytes", "processes", *(NAMES[kind] for kind in kinds), "on"), rows)


def _ratios(results: dict[str, Any]) -> list[str]:
    """Return the table of the ratios that the guard compares."""
    days = {(case["bytes"], case["consumers"]): _day(case["measured_on"]) for case in results["throughput"]}
    rows = []
    for name, ratio in RATIOS.items():
        if name in results["ratios"]:
            what = f"{'CPU' if ratio.is_cpu else 'messages a second'}, {ratio.case}"
            pair = f"{NAMES[ratio.of]}, to {NAMES[ratio.to]}: {what}"
            goal = f"{'at most' if ratio.is_cpu else 'at least'} {ratio.goal}" if ratio.goal else NONE
            day = days[ratio.bytes, ratio.consumers]
            rows.append((f"`{name}`", pair, results["ratios"][name], goal, day))
    return _table(("ratio", "of what", "measured", "goal", "on"), rows)


def _cpu(results: dict[str, Any]) -> list[str]:
    """Return the CPU a message of each case that has it, by contender and class of processes."""
    lines = []
    for case in results["throughput"]:
        cpu = case.get("cpu_us_per_message")
        if not cpu:
            continue
        this = Case(case["bytes"], case["consumers"])
        lines += [
            "",
            f"CPU of the whole system, µs a message, {this}, {_day(case['measured_on'])}:",
            "",
        ]
        rows = [
            (NAMES[kind], *(f"{cpu[kind][name]:.2f}" if name in cpu[kind] else NONE for name in CLASS_NAMES))
            for kind in NAMES
            if kind in cpu
        ]
        lines += _table(("contender", *CLASS_NAMES.values()), rows)
    return lines


def _producers(found: dict[str, Any]) -> list[str]:
    """Return the table of the producers."""
    latency = found["latency"]
    lines = [
        "",
        "Producers, thousands of messages a second, and latency from `send` to a reader of committed records:",
        "",
    ]
    sizes = " | ".join(f"{case['bytes']:,} B" for case in found["throughput"])
    ratios = " | ".join(f"{case['bytes']:,} B, of plain" for case in found["throughput"])
    cpu = " | ".join(f"{case['bytes']:,} B, CPU, µs" for case in found["throughput"])
    lines += [
        f"| | {sizes} | {ratios} | {cpu} | p50, ms | p95, ms |",
        "|---" * (3 + 3 * len(found["throughput"])) + "|",
    ]
    for kind, name in PRODUCER_NAMES.items():
        rates = " | ".join(f"{case['per_s'][kind] / 1000:,.0f}" for case in found["throughput"])
        shares = " | ".join(str(case["vs_plain"].get(kind, 1.0)) for case in found["throughput"])
        spent = " | ".join(str(case["cpu_us"][kind]) for case in found["throughput"])
        late = f"{latency['ms'][kind]['p50']} | {latency['ms'][kind]['p95']}"
        lines.append(f"| {name} | {rates} | {shares} | {spent} | {late} |")
    return lines


def _others(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return what is one figure or a few: name, figures, date."""
    days = {part: _day(machine) for part, machine in results["measured_on"].items()}
    hand_over, mass = results["latency"], results["mass_expiry"]
    folded, beside = mass["end_folded_ms"], mass["beside"]
    beside_ms = beside["other_queue_lateness_ms"]
    poison = results["poison"]["ratios_to_the_same_stream"]
    p95 = "; ".join(f"{LATENCY_NAMES[kind]} {spread['p95']:.1f} ms" for kind, spread in hand_over["ms"].items())
    rows = [(f"`send` to handler at {hand_over['per_s']:,} messages a second, 95th percentile", p95, days["latency"])]
    for rate, late in results["lateness_by_rate"].items():
        what = f"lateness of a redelivery after its deadline (broker's clock), {int(rate):,} expiries a second, warm"
        spread = late["lateness_ms"]
        figures = f"p50 {spread['p50']}, p99 {spread['p99']}, at most {spread['max']} ms; {late['early']} early"
        rows.append((what, figures, days["lateness"]))
    expiry = f"mass expiry: {mass['messages']:,} leases that run out at the same instant"
    figures = f"{mass['per_s']:,} redelivered a second ({mass['rates'][0]:,} to {mass['rates'][-1]:,})"
    rows.append((expiry, f"{figures}, {mass['early']} early", days["mass_expiry"]))
    if folded:
        figures = f"after {folded['p50'] / 1000:.1f} s (p50), {folded['max'] / 1000:.1f} s at most"
        rows.append(("an END that is written during the mass expiry: folded", figures, days["mass_expiry"]))
    if beside_ms["before"] and beside_ms["in_the_flood"]:
        figures = f"{beside['per_s']:,} redelivered a second; the other queue's lateness p99 "
        figures += f"{beside_ms['in_the_flood']['p99']} ms, {beside_ms['before']['p99']} ms before the mass expiry"
        what = "the same beside another queue of the application, which redelivers ten messages a second"
        rows.append((what, figures, days["mass_expiry"]))
    if "tracker_busy" in results:
        rate = f"{results['tracker_busy']['per_s']:,} messages a second"
        what = f"the tracker beside a consumer at full speed ({rate}, leases of 30 s)"
        rows.append((what, f"{results['tracker_busy_cores']} cores", days["busy"]))
    figures = f"{poison['raises']} where handlers raise, {poison['silent']} where deliveries end silently"
    rows.append(("good messages with 20 % poison, to the same stream without faults", figures, days["poison"]))
    return rows


def _costs(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the terms of the cost model."""
    days = {part: _day(machine) for part, machine in results["measured_on"].items()}
    ticks = results["tick_ms_by_partitions"]
    by_partitions = ", ".join(f"{count}: {ms} ms" for count, ms in ticks.items())
    (few, few_ms), *_, (many, many_ms) = ((int(count), ms) for count, ms in ticks.items())
    each_ms = (many_ms - few_ms) / (many - few)
    cores = int(results["measured_on"]["tracker"].split(", ")[1].removesuffix(" cores"))
    rows = [
        ("a TICK in each markers partition, by their number", by_partitions, days["tracker"]),
        ("*fixed*, from the first and the last of these", f"{few_ms - few * each_ms:.0f} ms", days["tracker"]),
        ("*partitions*, likewise", f"{each_ms:.1f} ms a markers partition on {cores} cores", days["tracker"]),
        (
            "predicted: *fixed* and *partitions* of 64 partitions on 16 cores",
            f"{few_ms - few * each_ms + 64 * each_ms * cores / 16:.0f} ms",
            "not measured",
        ),
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
            (f"*in flight*: a TICK with {counts} messages, {lie}", f"{ms} ms", days["tracker"]),
            ("the same: memory of driver, JVM and workers; state on disk", f"{gib} GiB; {disk} kB", days["tracker"]),
            ("the same: million messages started or ended a second, beside them", events, days["tracker"]),
        ]
    redelivery = f"{1e6 / results['mass_expiry_per_s']:.0f} µs a message"
    rows.append(("*redeliveries*, from the mass expiry", redelivery, days["mass_expiry"]))
    return rows
