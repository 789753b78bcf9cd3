"""
Which test crosses which crash point.

Rule 1: `@pytest.mark.crosses("tracker.batch", …)` names the points that must fire in a test; without names it is the
test's own parameter `point`.
Rule 2: it cannot say what is not so: each point that fires writes its name to a file (`KMQ_FAILPOINT_LOG`), and a test
that has passed fails after all where one of its points is not in there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kmq_spark.failpoints import LOG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT_VARIABLE = "KMQ_CROSSINGS_FILE"
"""Where the points of all collected tests go, as JSON."""


def points_of(item: pytest.Item) -> set[str]:
    """Return the crash points that must fire in a test."""
    found: set[str] = set()
    for marker in item.iter_markers("crosses"):
        callspec = getattr(item, "callspec", None)
        found |= set(marker.args) or ({callspec.params["point"]} if callspec is not None else set())
    return found


def watch(item: pytest.Item, file: Path) -> Iterator[None]:
    """Run a test, and look afterwards that its points have fired; what fixtures of the session start is not seen."""
    points = points_of(item)
    if not points:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG_VARIABLE, str(file))
        yield
    fired = set(file.read_text().split()) if file.exists() else set()
    assert points <= fired, f"crash points that did not fire: {', '.join(sorted(points - fired))}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """As a plugin of its own (`-p tests.crossings`): write down what the collected tests cross."""
    found = {point: item.nodeid for item in session.items for point in points_of(item)}
    Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(found))
