"""The results of the benchmarks as a table for people, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "plain": "plain `consume`",
    "share": "share consumer, explicit",
    "ack": "ours, one `ack()` a message",
    "batch": "ours, one `ack()` a batch",
    "run": "ours, `run(handler)`",
}

PRODUCER_NAMES = {
    "plain": "plain idempotent producer",
    "ours": "`QueueProducer`",
    "transactions": "plain in transactions of 100 ms",
    "numbered": "the same with three headers",
    "resuming": "`QueueProducer(producer_id=…)`, commits every 100 ms",
}

LATENCY_NAMES = NAMES | {"receive": "ours, `receive` and `ack()`"}


def _kinds(results: dict[str, Any]) -> list[str]:
    """Return the contenders that every stored case has: a run may measure other parts only."""
    return [kind for kind in NAMES if all(kind in case["per_s"] for case in results["throughput"])]


def write_table(results: dict[str, Any], path: Path) -> str:
    """Write the table as Markdown and return it."""
    machines: dict[str, list[str]] = {}
    for part, machine in results["measured_on"].items():
        machines.setdefault(machine, []).append(part.replace("_", " "))
    lines = [f"{', '.join(parts)}: measured on {machine}." for machine, parts in machines.items()]
    lines += ["", "By `make bench`. Thousands of messages a second, medians.", ""]
    kinds = _kinds(results)
    lines += ["| bytes | consumers | " + " | ".join([NAMES[kind] for kind in kinds]) + " |"]
    lines += ["|---" * (2 + len(kinds)) + "|"]
    for case in results["throughput"]:
        rates = " | ".join(f"{case['per_s'][kind]['median'] / 1000:,.0f}" for kind in kinds)
        lines.append(f"| {case['bytes']:,} | {case['consumers']} | {rates} |")
    lines += ["", "| ratio, 100 bytes, one consumer | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {ratio} |" for name, ratio in results["ratios"].items()]
    lines += ["", "| in flight | lie | TICK, ms | events/s | MiB, driver, JVM and workers | state on disk, kB |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| {row['in_flight']:,} | {row['kind']} | {row['tick_ms']:,} | {row['events_per_s']:,} | {row['rss_mib']:,} | "
        f"{row['state_bytes'] // 1000:,} |"
        for row in results["tracker"]
    ]
    by_partitions = ", ".join(f"{count}: {ms} ms" for count, ms in results["tick_ms_by_partitions"].items())
    lines += ["", f"A batch with a TICK in every markers partition, by their number: {by_partitions}."]
    hand_over = results["latency"]
    lines += ["", f"From `send` to the consumer's hands at {hand_over['per_s']:,} messages a second, ms:", ""]
    lines += ["| | p50 | p95 | p99 | p95 as a multiple of plain |", "|---|---|---|---|---|"]
    lines += [
        f"| {LATENCY_NAMES[kind]} | {spread['p50']} | {spread['p95']} | {spread['p99']} | "
        f"{hand_over['p95_vs_plain'].get(kind, 1.0)} |"
        for kind, spread in hand_over["ms"].items()
    ]
    lines += _producers(results["producers"]) if "producers" in results else []
    mass = results["mass_expiry"]
    lines += ["", f"Mass expiry of {mass['messages']:,}: {mass['per_s']:,} a second, {mass['early']} early."]
    for rate, late in results["lateness_by_rate"].items():
        spread = late["lateness_ms"]
        lines.append(f"Lateness at {rate}/s: p50 {spread['p50']}, p99 {spread['p99']}, max {spread['max']} ms.")
    alone, same = (
        ", ".join(f"{kind} {ratio}" for kind, ratio in results["poison"][name].items())
        for name in ("ratios", "ratios_to_the_same_stream")
    )
    lines.append(f"Good messages with 20 % poison, as a share of their rate in the same stream without faults: {same};")
    lines.append(f"of their rate alone, of which 0.8 is the most there can be: {alone}.")
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    return text


def _producers(found: dict[str, Any]) -> list[str]:
    """Return the table of the producers; results of before there was one have none."""
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
        if kind not in latency["ms"]:  # older results
            continue
        rates = " | ".join(f"{case['per_s'][kind] / 1000:,.0f}" for case in found["throughput"])
        shares = " | ".join(str(case["vs_plain"].get(kind, 1.0)) for case in found["throughput"])
        spent = " | ".join(str(case.get("cpu_us", {}).get(kind, "-")) for case in found["throughput"])
        late = f"{latency['ms'][kind]['p50']} | {latency['ms'][kind]['p95']}"
        lines.append(f"| {name} | {rates} | {shares} | {spent} | {late} |")
    return lines


def write_picture(results: dict[str, Any], path: Path) -> None:
    """Draw the rates of one consumer by size, and what a TICK costs by messages in flight."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  # the tables need none

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    cases = [case for case in results["throughput"] if case["consumers"] == 1]
    kinds = _kinds(results)
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        places = [place + number * width for place in range(len(cases))]
        left.bar(
            places, [case["per_s"][kind]["median"] / 1000 for case in cases], width, label=NAMES[kind].replace("`", "")
        )
    left.set_xticks([place + 0.3 for place in range(len(cases))], [f"{case['bytes']:,} B" for case in cases])
    left.set_ylabel("thousand messages a second")
    left.set_title("one consumer process")
    left.legend(frameon=False, fontsize="small")
    for kind, style in (("runs", "o-"), ("scattered", "s--")):
        rows = [row for row in results["tracker"] if row["kind"] == kind]
        right.plot([row["in_flight"] for row in rows], [row["tick_ms"] for row in rows], style, label=kind)
    right.set_xscale("log")
    right.set_ylim(bottom=0)
    right.set_xlabel("messages in flight")
    right.set_ylabel("batch with a TICK, ms")
    right.set_title("the tracker's batch")
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
