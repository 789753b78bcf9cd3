"""`kmq failpoints`: list the points at which a test can end a process."""

from __future__ import annotations

import typer

from kmq_spark.cli.shared.common import one_line_errors


@one_line_errors
def failpoints() -> None:
    """List the crash points that KMQ_FAILPOINT=name[:nth] arms, for fault tests."""
    # Imported here: loading the module checks the variable, and an unknown name is then reported like any other error.
    from kmq_spark.failpoints import FAILPOINTS

    width = max(map(len, FAILPOINTS))
    for name, what in FAILPOINTS.items():
        typer.echo(f"{name:<{width}}  {what}")
