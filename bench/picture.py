"""The results of the benchmarks as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.report import NAMES, day_of

if TYPE_CHECKING:
    from pathlib import Path

CPU_CLASSES = {"client": "client", "broker": "broker", "spark": "Spark's JVM and driver", "workers": "Python workers"}


def write_picture(results: dict[str, Any], path: Path) -> None:
    """Draw the newest rates by case, the CPU a message by class of processes, and a TICK by messages in flight."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  # the tables need none

    newest = max(day_of(case) for case in results["throughput"])
    cpu = results.get("cpu_us_per_message", {})
    count = 3 if cpu else 2
    figure, panels = plt.subplots(1, count, figsize=(5 * count, 4.4), layout="constrained")
    _draw_rates(panels[0], [case for case in results["throughput"] if day_of(case) == newest])
    if cpu:
        _draw_cpu(panels[1], cpu)
    _draw_ticks(panels[-1], results["tracker"])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_rates(axes: Any, cases: list[dict[str, Any]]) -> None:  # noqa: ANN401  # of matplotlib
    """Draw a group of bars for each case."""
    kinds = [kind for kind in NAMES if all(kind in case["per_s"] for case in cases)]
    width = 0.84 / len(kinds)
    for number, kind in enumerate(kinds):
        axes.bar(
            [place + (number - (len(kinds) - 1) / 2) * width for place in range(len(cases))],
            [case["per_s"][kind]["median"] / 1000 for case in cases],
            width,
            label=NAMES[kind].replace("`", ""),
        )
    axes.set_xticks(range(len(cases)), [f"{case['bytes']:,} B\n{case['consumers']} proc." for case in cases])
    axes.set_ylabel("thousand messages a second")
    axes.set_title("rate, by size and consumer processes")
    axes.legend(frameon=False, fontsize="small")


def _draw_cpu(axes: Any, cpu: dict[str, dict[str, float]]) -> None:  # noqa: ANN401  # of matplotlib
    """Draw a stacked bar for each contender."""
    kinds = [kind for kind in NAMES if kind in cpu]
    below = [0.0] * len(kinds)
    for name, label in CPU_CLASSES.items():
        heights = [cpu[kind].get(name, 0.0) for kind in kinds]
        axes.bar(range(len(kinds)), heights, 0.6, bottom=below, label=label)
        below = [under + height for under, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("CPU a message, µs")
    axes.set_title("CPU of the whole system, 100 B, one process")
    axes.legend(frameon=False, fontsize="small", loc="upper left")


def _draw_ticks(axes: Any, rows: list[dict[str, Any]]) -> None:  # noqa: ANN401  # of matplotlib
    for kind, style in (("runs", "o-"), ("scattered", "s--")):
        those = [row for row in rows if row["kind"] == kind]
        axes.plot([row["in_flight"] for row in those], [row["tick_ms"] for row in those], style, label=kind)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("messages in flight")
    axes.set_ylabel("batch with a TICK, ms")
    axes.set_title("the tracker's batch")
    axes.legend(frameon=False, fontsize="small")
