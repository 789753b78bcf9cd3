"""
Ask a ledger in a local folder, without Spark: delta-rs reads the Delta log, DuckDB runs the SQL of `sql/`.

Rule 1: Nothing is written or downloaded: DuckDB may not install extensions.
Rule 2: A table that cannot be read is an error that names it. There are no partial results.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kmq_spark.errors import ConfigError, LedgerError, needing
from kmq_spark.ledger.schema import COLUMNS, TABLES, VERSION_PROPERTY, Location, check_version, missing_table_error

with needing("ledger", "read a ledger"):
    import duckdb
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

if TYPE_CHECKING:
    from kmq_spark.core.markers import MessageId

VIEWS = (
    "marker_events", "deliveries", "in_flight", "stuck_now", "message_story", "slowest_handlers", "hottest_poison",
    "redeliveries_by_hour", "totals",
)  # fmt: skip
"""Every view, each after the views that it uses; its SQL, with its description, is in `sql/`."""

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    # A name in SQL must never refer to a Python variable of the caller. The search for one also loads pandas.
    "python_enable_replacements": False,
}

_STORY_COLUMNS = "* EXCLUDE (queue, origin_partition, origin_offset, step)"
"""Without what is the same in all rows of one message's history, or only defines their order."""


def connect(folder: str) -> duckdb.DuckDBPyConnection:
    """Open a ledger in DuckDB, with its tables and views by name, for your own SQL."""
    return _connect(Location(folder))


def read_rows(
    location: Location, view: str, *, queue: str = "", message: MessageId | None = None, limit: int
) -> list[dict[str, Any]]:
    """
    Return rows of a view or a table: values by column; instants are in UTC.

    *queue* is `queue` or `queue@subscription`, empty for all. *message* is any copy of the message whose history is
    asked for; it needs *queue*.
    """
    if view not in (*VIEWS, *TABLES):
        message_text = f"unknown view: got {view!r}; expected one of {', '.join((*VIEWS, *TABLES))}; correct the name"
        raise ConfigError(message_text)
    name, at, subscription = queue.partition("@")
    where, values = ("queue = ?", [name]) if queue else ("true", [])
    if at:
        or_both = "subscription IS NULL OR " if message is not None else ""
        where, values = f"{where} AND ({or_both}subscription = ?)", [*values, subscription]
    connection = _connect(location)
    try:
        columns, order = "*", ""
        if message is not None:
            # Fetch all rows, although there is only one: DuckDB accepts no other query before the last row was fetched.
            found = connection.execute(
                "SELECT origin_partition, origin_offset FROM messages "
                "WHERE queue = ? AND queue_partition = ? AND message_offset = ?",
                [name, *message],
            ).fetchall()
            where, values = (
                f"{where} AND origin_partition = ? AND origin_offset = ?",
                [*values, *(found or [message])[0]],
            )
            columns, order = _STORY_COLUMNS, "ORDER BY event_at, message_offset, step"
        query = f"SELECT {columns} FROM {view} WHERE {where} {order} LIMIT {limit:d}"  # noqa: S608  # ours
        # Convert through Arrow: DuckDB's own conversion of instants needs pytz.
        rows: list[dict[str, Any]] = connection.sql(query, params=values).to_arrow_table().to_pylist()
    except duckdb.Error as error:
        raise LedgerError(f"cannot read the ledger at {location}: got {_first_line(error)}; report it") from error
    finally:
        connection.close()
    return rows


def _connect(location: Location) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config=_CONFIG)
    connection.execute("SET TimeZone = 'UTC'")
    for table in TABLES:
        connection.register(f"stored_{table}", _dataset(location, table))
        columns = "*"
        if "key" in COLUMNS[table]:
            columns = "* REPLACE (coalesce(TRY(decode(key)), '0x' || lower(hex(key))) AS key)"
        connection.execute(f"CREATE VIEW {table} AS SELECT {columns} FROM stored_{table}")  # noqa: S608  # ours
    for view in VIEWS:
        connection.execute(f"CREATE VIEW {view} AS {view_sql(view)}")
    return connection


def view_sql(view: str) -> str:
    """Return the SQL of a view."""
    # Not a file path: spark-submit runs this package from an archive.
    return (files("kmq_spark.ledger") / "sql" / f"{view}.sql").read_text(encoding="utf-8")


def _dataset(location: Location, table: str) -> Any:  # noqa: ANN401  # pyarrow's, which has no types
    folder = location.local_folder
    if folder is None:
        raise LedgerError(
            f"cannot read the ledger at {location}: got no local folder; ask its tables by SQL where they are"
        )
    if not (folder / table / "_delta_log").is_dir():
        raise missing_table_error(location, table)
    name = location.sql_name(table)
    try:
        found = DeltaTable(folder / table)
        properties = found.metadata().configuration
        check_version(name, properties.get(VERSION_PROPERTY))
        if properties.get("delta.columnMapping.mode", "none") != "none":
            # An Arrow dataset finds columns by name. With column mapping, the names in the files differ.
            raise LedgerError(f"cannot read {name}: got a table with column mapping; ask it by SQL with Spark")
        return found.to_pyarrow_dataset()
    except (DeltaError, OSError) as error:
        raise LedgerError(
            f"cannot read {name}: got {_first_line(error)}; delta-rs must be able to read the table"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
