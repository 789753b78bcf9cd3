"""docs/delivery_control.md names a test for each of the twelve promises, and the test is there and kills something."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| (\d+) [^|]+\|[^|]+\| `([\w/]+\.py)`: `(test_\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "delivery_control.md").read_text())

KILLS = re.compile(r"\bkill\w*\(|\bos\.kill\b|EXIT_CODE|KMQ_FAILPOINT|VARIABLE")


def test_every_promise_has_a_row() -> None:
    assert sorted({int(number) for number, _, _ in ROWS}) == list(range(1, 13))


@pytest.mark.parametrize(("file", "name"), [row[1:] for row in ROWS])
def test_named_test_is_there_and_something_dies_in_it(file: str, name: str) -> None:
    text = (ROOT / "tests" / "kafka" / file).read_text()
    (found,) = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name == name]
    own = ast.get_source_segment(text, found) or ""
    # What the test runs in another process stands in a text beside it.
    programs = [
        ast.get_source_segment(text, each) or ""
        for each in ast.parse(text).body
        if isinstance(each, ast.Assign) and any(isinstance(to, ast.Name) and to.id in own for to in each.targets)
    ]
    assert KILLS.search(own + "".join(programs)), f"nothing is killed in {file}: {name}"
