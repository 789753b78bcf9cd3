"""What a run changes in its process, and that it puts it back."""

from __future__ import annotations

import gc
import sys

from kmq_spark.consumer.worker import COLLECT_AFTER, SWITCH_INTERVAL_S, _tuned_interpreter


def test_run_looks_for_cycles_seldom_and_changes_threads_often_and_as_before_afterwards() -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    with _tuned_interpreter():
        assert gc.get_threshold() == (COLLECT_AFTER, *before[0][1:])
        assert gc.get_freeze_count() > 0
        assert sys.getswitchinterval() <= SWITCH_INTERVAL_S
    assert (gc.get_threshold(), sys.getswitchinterval()) == before
    assert gc.get_freeze_count() == 0


def test_run_leaves_a_collector_alone_that_is_off_or_rarer() -> None:
    before = gc.get_threshold()
    for rarer in (0, COLLECT_AFTER * 2):
        gc.set_threshold(rarer, *before[1:])
        try:
            with _tuned_interpreter():
                assert gc.get_threshold()[0] == rarer
        finally:
            gc.set_threshold(*before)
