"""What the documents show works: the notebook's cells and the README's example, run as they stand."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from kmq_spark.kafka.consumer import QueueConsumer
from kmq_spark.kafka.topics import create_queue
from tests.kafka.conftest import read_all

pytestmark = pytest.mark.kafka

ROOT = Path(__file__).parents[2]


def test_notebook_runs_from_its_first_cell_to_its_last() -> None:
    """A reader who runs all cells sees what the text says."""
    notebook = json.loads((ROOT / "notebooks" / "queue_by_hand.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102  # our own notebook
    assert names["decisions"] == [(4, "DEAD_LETTER", "no such customer"), (5, "REDELIVER", "")]


def test_readme_example_runs_as_it_stands(
    bootstrap_servers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Producer and worker of the README: 98 messages acknowledged, one rejected, one given back for later."""
    example, control = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    create_queue("orders", bootstrap_servers=bootstrap_servers, partitions=2)
    create_queue("sent-emails", bootstrap_servers=bootstrap_servers, partitions=1)
    summaries = []
    run = QueueConsumer.run

    def run_until_settled(consumer: QueueConsumer, handler: Any, **options: Any) -> None:  # noqa: ANN401  # as `run`
        """Stop the worker once it has printed 98 lines; the example itself runs for ever."""
        lines: list[str] = []

        def stop_when_done() -> None:
            while len(lines) < 98:
                lines.extend(capsys.readouterr().out.splitlines())
                threading.Event().wait(0.05)
            consumer.stop()

        watcher = threading.Thread(target=stop_when_done)
        watcher.start()
        summaries.append(run(consumer, handler, **options))
        watcher.join()

    monkeypatch.setattr(QueueConsumer, "run", run_until_settled)
    names: dict[str, Any] = {}
    for code in (example, control):
        exec(compile(code.replace("localhost:9092", bootstrap_servers), "README.md", "exec"), names)  # noqa: S102  # our own
    (summary,) = summaries
    assert (summary.acked, summary.rejected, summary.released) == (98, 1, 1)
    assert [record.value() for record in read_all(bootstrap_servers, "sent-emails")] == [b"hello"]
