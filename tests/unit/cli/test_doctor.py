"""What `kmq doctor` prints of its findings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kmq_spark.cli.doctor import print_findings
from kmq_spark.inspection.findings import Finding, Level

if TYPE_CHECKING:
    import pytest


def test_repair_of_several_findings_is_printed_once_with_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    start = "kmq tracker run orders"
    print_findings(
        [
            Finding("broker", Level.OK, "1 broker"),
            Finding("tracker", Level.UNHEALTHY, "no tracker", start),
            Finding("topics", Level.WARNING, "one replica", "raise it"),
            Finding("in flight", Level.UNHEALTHY, "5 overdue", start),
        ]
    )
    table, _, repairs = capsys.readouterr().out.partition("\n\n")
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["ok", "unhealthy", "warning", "unhealthy"]
    assert [re.split(r" {2,}", line) for line in repairs.splitlines()[1:]] == [
        ["1.", "tracker, in flight", start],
        ["2.", "topics", "raise it"],
    ]


def test_without_a_repair_it_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("broker", Level.OK, "1 broker")])
    assert capsys.readouterr().out.endswith("\n\nhealthy\n")
