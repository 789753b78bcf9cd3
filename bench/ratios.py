"""The ratios that the project promises: what each compares, and whether one has fallen. No measuring here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

KINDS = ("plain", "share", "ack", "batch", "run")
"""All contenders of the throughput benchmark."""

TOLERATED = 0.8
"""Share of a stored ratio that a new one must reach: machines are shared and noisy."""


class Case(NamedTuple):
    """What is measured with all its contenders in turns: bytes of a message, processes that share a topic."""

    bytes: int
    consumers: int
    kinds: tuple[str, ...] = KINDS

    def __str__(self) -> str:
        """Return it as a person reads it."""
        return f"{self.bytes:,} B, {self.consumers} process{'' if self.consumers == 1 else 'es'}"


class Ratio(NamedTuple):
    """
    One contender's median, divided by that of another: messages a second, or CPU, where less is better.

    What the project wants to reach is its goal; 0 for none.
    """

    of: str
    to: str
    bytes: int = 100
    consumers: int = 1
    is_cpu: bool = False
    goal: float = 0

    @property
    def case(self) -> Case:
        """What must be measured for it."""
        return Case(self.bytes, self.consumers, tuple(kind for kind in KINDS if kind in (self.of, self.to)))

    def has_fallen(self, stored: float, now: float) -> bool:
        """Return whether a new value is worse than the stored one by more than is tolerated."""
        return now > stored / TOLERATED if self.is_cpu else now < stored * TOLERATED


RATIOS = {
    "batch_vs_share_consumer": Ratio("batch", "share", goal=1.4),
    "batch_vs_share_consumer_1k": Ratio("batch", "share", bytes=1_024, goal=1.7),
    "batch_vs_share_consumer_four": Ratio("batch", "share", consumers=4, goal=1.0),
    "batch_vs_plain": Ratio("batch", "plain", goal=0.65),
    "ack_vs_share_consumer": Ratio("ack", "share", goal=1.0),
    "ack_vs_share_consumer_1k": Ratio("ack", "share", bytes=1_024, goal=1.3),
    "ack_vs_plain": Ratio("ack", "plain"),
    "run_vs_plain": Ratio("run", "plain"),
    "batch_cpu_vs_share_consumer": Ratio("batch", "share", is_cpu=True, goal=1.0),
}
"""By their keys in results.json."""


def ratios(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each ratio whose two contenders were measured; *cases* as in `throughput` of results.json."""
    found = {}
    for name, ratio in RATIOS.items():
        for case in cases:
            if (case["bytes"], case["consumers"]) != (ratio.bytes, ratio.consumers):
                continue
            of, to = (_median(case, kind, is_cpu=ratio.is_cpu) for kind in (ratio.of, ratio.to))
            if of and to:
                found[name] = round(of / to, 2)
    return found


def cases_for(names: Iterable[str]) -> list[Case]:
    """Return the least that must be measured for these ratios: each case once, with the contenders that it needs."""
    needed: dict[tuple[int, int], set[str]] = {}
    for name in names:
        case = RATIOS[name].case
        needed.setdefault((case.bytes, case.consumers), set()).update(case.kinds)
    return [Case(*case, tuple(kind for kind in KINDS if kind in kinds)) for case, kinds in needed.items()]


def together(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return stored results with those of the parts, and of the cases of the throughput, that were measured anew.

    The ratios are made from the cases. Each compares contenders of one case, so of one run.
    """
    found = {**before, **new}
    for name in ("measured_on", "took_s"):
        found[name] = before.get(name, {}) | new.get(name, {})
    by_case = {(case["consumers"], case["bytes"]): case for case in (*before["throughput"], *new.get("throughput", ()))}
    found["throughput"] = [by_case[key] for key in sorted(by_case)]
    found["ratios"] = ratios(found["throughput"])
    return found


def _median(case: Mapping[str, Any], kind: str, *, is_cpu: bool) -> float:
    """Return a median; 0 where it was not measured."""
    if is_cpu:
        return float(case.get("cpu_us_per_message", {}).get(kind, {}).get("sum", 0))
    return float(case["per_s"].get(kind, {}).get("median", 0))
