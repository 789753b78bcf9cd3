"""`kmq failpoints`: where a test may end a process, and how."""

from __future__ import annotations

import typer

from kmq_spark.cli.common import told_clearly


@told_clearly
def failpoints() -> None:
    """List the crash points that KMQ_FAILPOINT=name[:nth] arms, for fault tests."""
    # Loaded here: an unknown name in the environment is found while the module loads, and told as any other error.
    from kmq_spark.failpoints import FAILPOINTS  # noqa: PLC0415

    width = max(map(len, FAILPOINTS))
    for name, what in FAILPOINTS.items():
        typer.echo(f"{name:<{width}}  {what}")
