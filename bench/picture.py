"""The results of the benchmarks as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.report import NAMES

if TYPE_CHECKING:
    from pathlib import Path

CPU_CLASSES = {"client": "client", "broker": "broker", "spark": "Spark's JVM and driver", "workers": "Python workers"}


def write_picture(results: dict[str, Any], path: Path) -> None:
    """Draw the rates by case, the CPU a message by class of processes, and a TICK by messages in flight."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  # the tables need none

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    _draw_rates(left, results["throughput"])
    _draw_cpu(middle, results.get("cpu_us_per_message", {}))
    _draw_ticks(right, results["tracker"])
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_rates(axes: Any, cases: list[dict[str, Any]]) -> None:  # noqa: ANN401  # of matplotlib
    """Draw a group of bars for each case; a contender that a case lacks leaves a gap."""
    kinds = [kind for kind in NAMES if any(kind in case["per_s"] for case in cases)]
    width = 0.84 / len(kinds)
    for number, kind in enumerate(kinds):
        has_it = [(place, case["per_s"][kind]) for place, case in enumerate(cases) if kind in case["per_s"]]
        axes.bar(
            [place + (number - (len(kinds) - 1) / 2) * width for place, _ in has_it],
            [spread["median"] / 1000 for _, spread in has_it],
            width,
            label=_plain(kind),
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
    if kinds:
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


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


def _plain(kind: str) -> str:
    return NAMES[kind].replace("`", "")
