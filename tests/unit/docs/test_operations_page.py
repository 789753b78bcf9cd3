"""The tables of `docs/operations.md` are those of the code: metrics, alerts, and the actions of log records."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from kmq_spark.log_actions import LOG_ACTIONS
from kmq_spark.metrics.names import METRICS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
RULES = ROOT / "conf" / "prometheus" / "kmq-alerts.yml"


def rows_of(head: str) -> list[tuple[str, ...]]:
    """Return the cells of the table with this first line."""
    lines = PAGE.split(f"{head}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def actions_in(source: str) -> set[str]:
    """Return each literal value of `action` in a dict with literal keys, except those of Spark and of decisions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                is_action = isinstance(key, ast.Constant) and key.value == "action"
                if is_action and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.add(value.value)
    return found


def test_an_action_of_a_log_record_is_found() -> None:
    assert actions_in('logger.info("x", extra={"action": "ready", "queue": q}); d = {"action": 1, "other": "y"}') == {
        "ready"
    }


def test_every_action_of_the_code_is_in_the_list_and_every_one_of_the_list_in_the_code() -> None:
    used = {
        action
        for folder in ("kmq_spark", "jobs")
        for path in (ROOT / folder).rglob("*.py")
        for action in actions_in(path.read_text("utf-8"))
    }
    assert used == set(LOG_ACTIONS)
    assert list(LOG_ACTIONS) == sorted(LOG_ACTIONS)


def test_table_of_actions_is_that_of_the_code() -> None:
    assert rows_of("| action | meaning |") == [(f"`{name}`", meaning) for name, meaning in LOG_ACTIONS.items()]


def test_table_of_metrics_is_that_of_the_code() -> None:
    expected = {
        (f"`{name}`", ", ".join(metric.labels), metric.meaning + (" (histogram)" if metric.kind == "histogram" else ""))
        for name, metric in METRICS.items()
    }
    assert set(rows_of("| metric | labels | meaning |")) == expected


def test_table_of_alerts_is_that_of_the_rules() -> None:
    def shown(text: str) -> str:
        shown = re.sub(r"\{\{ \$value \}\} ", "", text)
        return shown.replace("{{ $labels.queue }}", "QUEUE").replace("{{ $labels.group }}", "GROUP")

    rules = [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]
    expected = [
        (f"`{rule['alert']}`", shown(rule["annotations"]["summary"]), shown(rule["annotations"]["action"]))
        for rule in rules
    ]
    assert rows_of("| alert | means | do |") == expected
