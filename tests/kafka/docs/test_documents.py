"""What the documents show works: the notebook's cells and every block of README and docs, typed as they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kmq_spark.local.probe import free_port
from tests.kafka.conftest import read_all
from tests.kafka.documents import LANGUAGES, Reader, blocks_of, make_reader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["make_reader"]  # a fixture of this module

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[3]


def run_cells(name: str) -> dict[str, Any]:
    """Run the cells of a notebook in order; return its names."""
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102  # our own notebook
    return names


def test_notebook_runs_from_its_first_cell_to_its_last() -> None:
    """A reader who runs all cells sees what the text says."""
    assert run_cells("queue_by_hand")["decisions"] == [(4, "DEAD_LETTER", "no such customer"), (5, "REDELIVER", "")]


@pytest.mark.spark
@pytest.mark.slow  # a minute of work, and its ledger
@pytest.mark.timeout(900)
def test_ledger_notebook_draws_a_minute_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes its data by the product; each of its four plots is drawn, nothing is early or missing."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = run_cells("ledger")
    drawn = [len(names["plt"].figure(number).axes) for number in names["plt"].get_fignums()]
    names["plt"].close("all")
    assert drawn == [1, 2, 2, 1]
    assert (names["early"], names["totals"][0]["missing"]) == (0, 0)
    assert (len(names["redelivered"]) > 10, names["dead"].letters.sum() > 0, len(names["story"]) > 3) == (True,) * 3


DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "README.md": 1,
    "docs/deployment.md": 3,
    "docs/dramatiq.md": 1,
    "docs/internals/faults.md": 2,
    "docs/ledger.md": 1,
    "docs/performance.md": 1,
    "docs/producing.md": 1,
    "docs/security.md": 1,
    "docs/worker.md": 3,
}
"""Blocks with a reason why they are not run, by document: one more is a decision."""

OUTPUT = {"README.md": 1, "docs/internals/design.md": 1, "docs/ledger.md": 1}
"""Blocks of `text`: output and drawings."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_of_a_document_runs_or_says_why_not(document: str) -> None:
    """So that none escapes in silence: each has a language that is known, and the exceptions are counted."""
    blocks = blocks_of(document)
    assert (ROOT / document).read_text(encoding="utf-8").count("```") == 2 * len(blocks)
    assert {block.language for block in blocks} <= LANGUAGES
    assert sum(bool(block.reason) for block in blocks) == NOT_RUN.get(document, 0)
    assert sum(block.language == "text" for block in blocks) == OUTPUT.get(document, 0)


def has_handled_all(written: str) -> bool:
    """Return whether the README's worker has printed 99 of 100 messages: one was rejected."""
    return written.count("b'order ") == 99


@pytest.mark.slow  # installs into an environment of its own
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_readme_runs_as_typed(make_reader: Callable[[int], Reader]) -> None:
    """In order, from `kmq up` to the ledger; what runs on ends with SIGTERM, well."""
    port = free_port()
    reader = make_reader(port)
    reader.read("README.md", until={"consumer.run(handle": has_handled_all})
    servers = f"127.0.0.1:{port}"
    assert [record.value() for record in read_all(servers, "sent-emails")] == [b"hello"]
    assert [record.value() for record in read_all(servers, "orders.dlq")] == [b"order 13"]
    reader.stop()
