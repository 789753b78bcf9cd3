"""`kmq queue alter`, and the rules in `create` and `describe`: rules are stored with a queue, not with its tracker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kmq_spark.cli.shared.options import seconds
from kmq_spark.cli.shared.output import table
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kmq_spark.config import Settings

Execute = Annotated[bool, typer.Option("--execute", help="Write the change; without it the change is only shown.")]
ExpectVersion = Annotated[
    int | None, typer.Option("--expect-version", help="Refuse unless the rules have this version.", metavar="N")
]


@dataclass(frozen=True)
class RuleOptions:
    """Options for the rules of a queue."""

    max_deliveries: Annotated[
        int | None, typer.Option("--max-deliveries", help="Last allowed delivery, then a dead letter; 0 = no limit.")
    ] = None
    backoff: Annotated[
        str | None, typer.Option("--backoff", help="none, constant, linear or exponential.", metavar="KIND")
    ] = None
    backoff_initial: Annotated[
        str | None,
        typer.Option("--backoff-initial", help="Backoff after the first failed delivery.", metavar="DURATION"),
    ] = None
    backoff_max: Annotated[str | None, typer.Option("--backoff-max", help="Longest backoff.", metavar="DURATION")] = (
        None
    )
    backoff_jitter: Annotated[
        float | None, typer.Option("--backoff-jitter", help="Share of each backoff that may be left out, 0 to 1.")
    ] = None
    expired: Annotated[
        str | None, typer.Option("--expired", help="Messages past their time to live: drop or dead-letter.")
    ] = None
    lease: Annotated[str | None, typer.Option("--lease", help="Lease of consumers that set none.", metavar="TIME")] = (
        None
    )

    def given(self) -> dict[str, Any]:
        """Return the rules for which an option was given."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        durations = [name for name in ("backoff_initial", "backoff_max", "lease") if name in given]
        return given | {name: seconds(given[name], _flag(name)) for name in durations}


def alter_rules(
    name: str, options: RuleOptions, settings: Settings, *, execute: bool, expect_version: int | None
) -> list[dict[str, Any]]:
    """
    Change the rules of a queue, or return what would change.

    Returns:
        One row for the version and one for each rule: `rule`, `now` (None for a queue without rules) and `new`.

    Raises:
        ConfigError: No rule option was given, a value is not allowed, or the rules have another version.
        TopicError: The queue does not exist.
    """
    from kmq_spark.kafka.queue_rules import (
        RULE_NAMES,
        StoredRules,
        checked_rules,
        checked_version,
        read_rules,
        write_rules,
    )
    from kmq_spark.kafka.topics import check_queue

    given = options.given()
    if not given:
        raise ConfigError(f"no rule is named: got no option of {', '.join(map(_flag, RULE_NAMES))}; name at least one")
    reach = settings.kafka.reach()
    check_queue(name, **reach)
    found = read_rules(name, **reach)
    version = checked_version(name, found, expect_version)
    base = (found or StoredRules(name)).by_name()
    wanted = checked_rules({**base, **given})
    new = wanted.by_name()
    rows = [{"rule": "version", "now": version or None, "new": version + 1}]
    rows += [{"rule": rule, "now": None if found is None else base[rule], "new": new[rule]} for rule in new]
    if execute:
        write_rules(name, wanted, expected_version=version, **reach)
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Return the changes as a table."""
    return table(
        ("RULE", ">NOW", ">NEW"),
        [(row["rule"], _cell(row["now"]), _cell(row["new"]) if row["now"] != row["new"] else "") for row in rows],
    )


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _flag(rule: str) -> str:
    return f"--{rule.replace('_', '-')}"
