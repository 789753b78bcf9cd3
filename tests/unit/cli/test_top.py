"""`kmq top` in a narrow terminal."""

from __future__ import annotations

from dataclasses import replace

from kmq_spark.cli.shared.output import rendered
from kmq_spark.cli.top import Frame, _table
from kmq_spark.inspection.facts import TrackerFacts
from tests.unit.inspection.test_findings import facts_of


def test_80_columns_show_what_is_overdue_redelivered_and_that_no_tracker_runs() -> None:
    view = facts_of().view
    views = {"orders": view, "emails": replace(view, queue="emails", tracker=TrackerFacts())}
    rates = {"orders": {"acked": 1234.5, "redelivered": 17.25}}
    head, orders, emails = rendered(_table(Frame(views, rates), 80)).splitlines()
    assert max(map(len, (head, orders, emails))) <= 80
    assert head.split() == ["QUEUE", "READY", "FLIGHT", "OVERDUE", "ACK/S", "REDEL/S", "DEAD", "TRACKER"]
    assert (orders.split()[-4:], emails.endswith("never ran")) == (["1234.5", "17.2", "0", "running"], True)
