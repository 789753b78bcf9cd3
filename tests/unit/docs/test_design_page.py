"""docs/design.md: every name in it exists, its map is complete, its walks are short; and the folders stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "kmq_spark"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")

LONGEST_WALK = 5
MOST_MODULES_AT_ROOT = 10
MOST_FILES_IN_A_FOLDER = 25

NAMED = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)(?::([\w.]+))?`", PAGE)))
"""Files that the page names, and the name after the colon; empty where there is none."""


def file_of(path: str) -> Path:
    """Return a file of the page; paths are relative to the package, those of tests to the repository."""
    return (ROOT if path.startswith(("tests/", "jobs/", "faults/", "bench/")) else PACKAGE) / path


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return the functions, classes, methods and constants that a module or a class defines."""
    found: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(prefix + node.name)
            case ast.ClassDef():
                found |= {prefix + node.name} | names_in(node.body, f"{prefix}{node.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(prefix + name)
    return found


def section(title: str) -> str:
    """Return the text below a heading, up to the next heading of its level."""
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def packages() -> list[Path]:
    """Return all folders of the package that hold modules."""
    return sorted({each.parent for each in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: value or "-")
def test_named_file_and_function_exist(path: str, name: str) -> None:
    assert file_of(path).is_file()
    if name:
        assert name in names_in(ast.parse(file_of(path).read_text(encoding="utf-8")).body)


def test_page_names_functions() -> None:
    """Otherwise the test above has nothing to check."""
    assert sum(bool(name) for _, name in NAMED) >= 20


def test_map_names_each_folder_and_each_module_of_the_root() -> None:
    rows = [line.split("|")[1] for line in section("Map").splitlines() if line.startswith("| `")]
    mapped = set(re.findall(r"`([\w/.]+)`", " ".join(rows[: rows.index(" `core/clock.py` ")])))
    modules = {each.name for each in PACKAGE.glob("*.py") if each.name != "__init__.py"}
    folders = {each.parent.name for each in PACKAGE.glob("*/*.py")}
    assert modules | folders <= mapped
    assert not [each for each in mapped if not (PACKAGE / each).exists()]


def test_walks_have_at_most_five_hops() -> None:
    walks = section("A message's walk through the code").split("\n**")[1:]
    assert [walk.split("**")[0] for walk in walks] == ["Send", "Receive", "Ack", "Redelivery", "Redrive"]
    for walk in walks:
        assert 1 <= len(re.findall(r"^\d\. `\w", walk, re.MULTILINE)) <= LONGEST_WALK


def test_folders_are_small() -> None:
    counts = {str(each.relative_to(ROOT)): len(list(each.glob("*.py"))) for each in packages()}
    assert {name: count for name, count in counts.items() if count > MOST_FILES_IN_A_FOLDER} == {}
    assert counts["kmq_spark"] <= MOST_MODULES_AT_ROOT
