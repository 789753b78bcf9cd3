"""Logs of the commands: lines of text, or JSON objects that say more than the text."""

from __future__ import annotations

import json
import logging

from kmq_spark.cli.shared.common import JsonLines


def line_of(**more: object) -> dict[str, object]:
    """Return what a line says of an event."""
    record = logging.LogRecord("kmq_spark.tracker", logging.WARNING, "file.py", 7, "%d lost", (2,), None)
    vars(record).update(more)
    found: dict[str, object] = json.loads(JsonLines().format(record))
    return found


def test_line_has_the_text_and_what_the_event_says_beside_it() -> None:
    found = line_of(action="lease_lost", queue="orders", partition=3, created=0.5)
    assert found == {
        "time": "1970-01-01T00:00:00.500+00:00", "level": "WARNING", "logger": "kmq_spark.tracker", "message": "2 lost",
        "action": "lease_lost", "queue": "orders", "partition": 3,
    }  # fmt: skip


def test_exception_is_a_part_of_its_line() -> None:
    found = line_of(exc_info=(KeyError, KeyError("order"), None))
    assert found["exception"] == "KeyError: 'order'"
