"""Every setting that a document names exists: `KMQ_TRACKER__QUEUES`, `[tracker] rest_ms`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kmq_spark.config import load_settings

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VARIABLE = re.compile(r"KMQ_([A-Z]+)__([A-Z_]+)")
KEY = re.compile(r"`\[([a-z]+)\] ([a-z_]+)")


def settings_of(text: str) -> set[tuple[str, str]]:
    """Return section and key of each setting that is named."""
    return {(section.lower(), key.lower()) for section, key in (*VARIABLE.findall(text), *KEY.findall(text))}


def missing(named: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those that are no settings."""
    settings = load_settings()
    return {(section, key) for section, key in named if not hasattr(getattr(settings, section, None), key)}


def test_a_setting_that_is_not_there_is_found() -> None:
    named = settings_of("`KMQ_TRACKER__QUEUES=…`, KMQ_TRACKERS__QUEUES, `[queue] backoff = 1`, `[queue] back`")
    assert missing(named) == {("trackers", "queues"), ("queue", "back")}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_setting_that_is_named_exists(path: Path) -> None:
    assert not missing(settings_of(path.read_text("utf-8")))
