"""What the demo reads of its workers."""

from __future__ import annotations

from kmq_spark.demo.processes import complete_events


def test_line_that_is_being_written_is_left_for_the_next_look() -> None:
    """A reader may see the first half of a write."""
    whole = b'{"event": "begun", "path": "a.py"}\n'
    assert complete_events(whole + b'{"event": "counted", "pa') == [{"event": "begun", "path": "a.py"}]
    assert complete_events(whole * 2) == [{"event": "begun", "path": "a.py"}] * 2
    assert complete_events(b"") == complete_events(b'{"eve') == []
