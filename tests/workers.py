"""
How tests are spread over processes (pytest-xdist), and what ends one that hangs.

Rule 1: tests that share something expensive, such as a Spark session, form a group; a group runs in one process.
Rule 2: every other test runs in whichever process is free.
Rule 3: what takes longest starts first, so that no process works on alone at the end.
Rule 4: a process that dies fails the test that it ran, and that test is not run again; the rest of its group runs.
"""

from __future__ import annotations

import faulthandler
import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest
    from xdist.workermanage import WorkerController

GROUPS_FILE = "kmq_groups_file"
"""Key of the controller's message to its workers: the file into which they write their groups."""

TRACKERS = "tracker"
"""Tests of this folder that need a Spark session are a group of their own: one for all would take too long."""

WITH_THE_OTHERS = frozenset({"test_bad_input.py"})
"""Except these: so the two groups take about as long."""

_LAST_RESORT_S = 60.0
"""From the exception that ends a test whose time is up to the end of a process that the exception did not reach."""


def group_of(item: pytest.Item) -> str:
    """Return the group of a test: its Spark session's, its module's where that shares a fixture, or its own."""
    assert hasattr(item, "_fixtureinfo")
    if "spark" in item._fixtureinfo.names_closure:
        is_of_trackers = item.path.parent.name == TRACKERS and item.path.name not in WITH_THE_OTHERS
        return "spark, trackers" if is_of_trackers else "spark"
    shared = [each[-1].scope for each in item._fixtureinfo.name2fixturedefs.values()]
    return item.nodeid.split("::")[0] if {"module", "class"} & set(shared) else item.nodeid


def longest_first(items: Sequence[pytest.Item], default_limit_s: float) -> list[pytest.Item]:
    """
    Sort tests so that the groups which may take longest come first; the order within a group stays.

    The time limit of a test says how long it may take: who sets one that is not below the default has a reason.
    """
    limits_s: dict[str, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0]) if marker is not None and marker.args else 0.0
        # Tests without a limit of their own are short.
        limits_s[group_of(item)] = limits_s.get(group_of(item), 0.0) + (limit_s if limit_s >= default_limit_s else 1.0)
    return sorted(items, key=lambda item: -limits_s[group_of(item)])


def write_groups(items: Sequence[pytest.Item], file: Path) -> None:
    """Write down the group of each test; all workers write the same, and a reader sees a whole file."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({item.nodeid: group_of(item) for item in items}))
    unfinished.replace(file)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist says nothing of its types
    """
    Groups of tests over workers, in the order in which their first tests were collected.

    xdist's own `loadgroup` puts the group into the test's id, which pytest 9.2 does not let it, and runs a test that
    killed its worker again and again.
    """

    def __init__(self, config: pytest.Config, log: Any, groups_file: Path) -> None:  # noqa: ANN401  # xdist's own
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist would sort the groups by their numbers of tests
        self._groups_file = groups_file
        self._groups: dict[str, str] = {}

    def schedule(self) -> None:
        """Give every worker something to do."""
        self._groups = self._groups or json.loads(self._groups_file.read_text())
        super().schedule()
        # A worker starts a test once it knows the next one; a group of one test is not enough.
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out; return the test during which it died, and hand its other tests to others."""
        workload: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        left = {group: [test for test, is_done in unit.items() if not is_done] for group, unit in workload.items()}
        crashed = next((tests.pop(0) for tests in left.values() if tests), None)
        for group, tests in left.items():
            if tests:
                self.workqueue[group] = dict.fromkeys(tests, False)
                self.workqueue.move_to_end(group, last=False)
        for other in self.nodes:
            # The worker that replaces this one has not collected its tests yet.
            if other in self.registered_collections:
                self._reschedule(other)
        return crashed

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a test."""
        return self._groups[nodeid]


@contextmanager
def last_resort(item: pytest.Item, stderr: int) -> Iterator[None]:
    """End this process where the time of a test was up a minute ago and no exception has ended the test."""
    marker = item.get_closest_marker("timeout")
    timeout_s = float(marker.args[0] if marker is not None and marker.args else item.config.getini("timeout"))

    # Not a thread of Python: it would never run where a client's C code hangs with Python's lock (the GIL) held.
    faulthandler.dump_traceback_later(timeout_s + _LAST_RESORT_S, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
