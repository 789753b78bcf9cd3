"""`kmq tracker once`: redeliver overdue messages once and end, without Spark."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kmq_spark.cli import tracker
from kmq_spark.cli.shared.common import one_line_errors, print_json, run_alone, set_up_logs
from kmq_spark.cli.shared.options import Address, LogLevel, Timeout, settings_from

logger = logging.getLogger(__name__)


@tracker.app.command("once")
@one_line_errors
def once(
    address: Address,
    queues: tracker.Queues = None,
    max_deliveries: tracker.MaxDeliveries = None,
    timeout: Timeout = None,
    events: Annotated[bool, typer.Option("--events", help="Print a JSON line when ended.")] = False,
    log_level: LogLevel = "INFO",
) -> None:
    """Redeliver what is overdue and end; no Spark, no checkpoint: for serverless jobs and cron."""
    set_up_logs(tracker.log_level_of(log_level))
    settings = settings_from(
        address,
        timeout,
        tracker={"queues": tuple(queues) if queues else None},
        queue={"max_deliveries": max_deliveries},
    )
    tracker.check_queues(settings)
    from kmq_spark.tracker.once import track_once

    for queue in settings.tracker.queues:
        stats = track_once(queue, settings)
        counts = {
            "redelivered": stats.redelivered,
            "dead_lettered": stats.dead_lettered,
            "expired": stats.expired,
        }
        if events:
            print_json({"event": "ended", "queue": queue, **counts})
        logger.info(
            "%s: %s", queue, ", ".join(f"{count} {name}" for name, count in counts.items()),
            extra={"action": "ended", "queue": queue},
        )  # fmt: skip


def run_submitted() -> None:
    """Run with the arguments of `kmq tracker once`, for Databricks wheel tasks."""
    run_alone(once)
