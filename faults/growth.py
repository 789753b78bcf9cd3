"""
Whether something grows: a line fitted through samples of a long run, against what it may grow by in an hour.

Rule 1: the slope is the median of the slopes between all pairs of samples (Theil and Sen): a spike does not tilt it.
It is believed where the level has risen, too, from the first quarter to the last: a saw-tooth, as of garbage that is
collected now and then, climbs most of the time and gets nowhere.
Rule 2: samples of the warm-up do not count: caches fill and heaps settle.
Rule 3: a verdict needs enough samples; with fewer there is none, which is a failure and no pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_SAMPLES = 8
"""After the warm-up."""

WARM_UP_SHARE = 1 / 3
"""Of a run: ten minutes of half an hour."""

HOUR_S = 3_600.0


class Bound(NamedTuple):
    """
    What one measure may grow by.

    Attributes:
        an_hour: In its own unit.
        noise: Rise of the level below which a slope says nothing: the measure moves by as much when nothing grows.
    """

    an_hour: float
    noise: float


class Growth(NamedTuple):
    """
    What one measure did after the warm-up.

    Attributes:
        first: Its median in the first quarter.
        last: Its median in the last quarter.
        an_hour: Fitted slope.
        bound: Largest slope allowed.
        is_too_much: Whether the slope is above the bound, and the rise from first to last above the noise.
    """

    first: float
    last: float
    an_hour: float
    bound: float
    is_too_much: bool


def after_warm_up(times_s: Sequence[float]) -> int:
    """Return the index of the first sample that counts."""
    begins_s = times_s[0] + (times_s[-1] - times_s[0]) * WARM_UP_SHARE
    return int(np.searchsorted(np.asarray(times_s), begins_s))


def growth(times_s: Sequence[float], values: Sequence[float], bound: Bound) -> Growth:
    """
    Fit a line through the samples after the warm-up.

    Args:
        times_s: When each sample was taken, ascending, seconds.
        values: The samples.
        bound: What the measure may grow by.

    Raises:
        ValueError: Too few samples follow the warm-up.
    """
    first = after_warm_up(times_s) if times_s else 0
    at, value = np.asarray(times_s[first:], dtype=float), np.asarray(values[first:], dtype=float)
    if len(at) < LEAST_SAMPLES:
        message = (
            f"too few samples for a verdict: got {len(at)} after the warm-up, at least {LEAST_SAMPLES}; run longer"
        )
        raise ValueError(message)
    quarter = max(1, len(value) // 4)
    one, other = np.triu_indices(len(at), k=1)
    slope = float(np.median((value[other] - value[one]) / (at[other] - at[one])))
    begins, ends = float(np.median(value[:quarter])), float(np.median(value[-quarter:]))
    is_too_much = slope * HOUR_S > bound.an_hour and ends - begins > bound.noise
    return Growth(round(begins, 1), round(ends, 1), round(slope * HOUR_S, 1), bound.an_hour, is_too_much)


def grown(
    times_s: Sequence[float], series: Mapping[str, Sequence[float]], bounds: Mapping[str, Bound]
) -> dict[str, Growth]:
    """Return what each measure did, by name; each measure needs a bound."""
    return {name: growth(times_s, values, bounds[name]) for name, values in series.items()}
