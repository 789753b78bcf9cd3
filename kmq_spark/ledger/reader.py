"""
Read a ledger in a local folder without Spark: delta-rs reads the Delta log, DuckDB runs the SQL.

Rule 1: The views are exactly those of `sql/`. `_SETUP` defines for DuckDB the functions that only Spark has.
Rule 2: Nothing is written or downloaded: DuckDB may not install extensions.
Rule 3: A table that this reader cannot read is an error that names it. There are no partial results.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from kmq_spark.errors import LedgerError, SetupError
from kmq_spark.ledger.queries import VIEWS, known_view, queue_and_group, view_sql
from kmq_spark.ledger.schema import (
    COLUMNS,
    TABLES,
    VERSION_PROPERTY,
    Location,
    check_columns,
    check_version,
    missing_table_error,
)

try:
    import duckdb
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError
except ImportError as error:
    raise SetupError(
        f"cannot read a ledger: module {error.name!r} is not installed; run `pip install 'kmq-spark[ledger]'`"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kmq_spark.core.markers import MessageId

_SETUP = """
SET TimeZone = 'UTC';
CREATE MACRO unix_millis(instant) AS epoch_ms(instant);
CREATE MACRO timestamp_millis(ms) AS make_timestamptz(ms * 1000);
CREATE MACRO sequence(low, high) AS generate_series(low, high);
CREATE MACRO explode(items) AS unnest(items);
CREATE MACRO collect_set(item) AS coalesce(list(DISTINCT item) FILTER (item IS NOT NULL), []);
CREATE MACRO count_if(condition) AS count(CASE WHEN condition THEN 1 END);  -- DuckDB's own returns a HUGEINT
CREATE MACRO percentile_approx(value, share) AS quantile_disc(value, share);
-- The views use one pattern, yyyy-MM-dd HH:mm:ss.SSS.
CREATE MACRO date_format(instant, pattern) AS strftime(instant, '%Y-%m-%d %H:%M:%S.%g');
CREATE MACRO text_of(value) AS coalesce(TRY(decode(value)), repaired_text(value));
"""

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    # A name in SQL must never refer to a Python variable of the caller. The search for one also loads pandas.
    "python_enable_replacements": False,
}

_TYPES = {"integer": "int", "long": "bigint"}
"""Delta's type names whose SQL names differ."""

_OMITTED_FROM_HISTORY = "queue, origin_partition, origin_offset, step"
"""Columns that have the same value in all rows of one message's history, or only define their order."""


def connect(folder: str) -> duckdb.DuckDBPyConnection:
    """
    Open a ledger in DuckDB, with its tables and views by name, for custom SQL.

    In `messages` and `dead_letters` the column `key` is text; bytes that are not UTF-8 are replaced by U+FFFD.

    Args:
        folder: Local path of the ledger.

    Returns:
        An in-memory connection. It reads the present version of the ledger; later batches need a new connection.

    Raises:
        LedgerError: The folder contains no ledger of this version, or delta-rs does not support its Delta features.
        SetupError: The extra `ledger` is not installed.
    """
    return _connect(Location(folder))


def read_rows(
    location: Location, view: str, *, queue: str = "", message: MessageId | None = None, limit: int
) -> list[dict[str, Any]]:
    """
    Return rows of a view or a table.

    Args:
        location: Location of the ledger: a local folder.
        view: Name of the view or table.
        queue: Return only rows of `queue` or `queue@subscription`; all rows if empty.
        message: Any copy of the message whose history is requested; needs *queue*.
        limit: Maximum number of rows.

    Returns:
        Values by column, one mapping per row. Instants are in UTC.

    Raises:
        ConfigError: There is no such view.
        LedgerError: As for `connect`.
    """
    known_view(view)
    connection = _connect(location)
    try:
        if message is not None:
            return _rows(connection, *_history_query(connection, queue, message, limit))
        # Read tables as they are stored: keys remain bytes.
        source = f"{view}_as_stored" if view in TABLES else view
        where, values = _of_queue(queue)
        return _rows(connection, f"SELECT * FROM {source} WHERE {where} LIMIT {limit:d}", values)  # noqa: S608  # ours
    except duckdb.Error as error:
        raise LedgerError(
            f"cannot read the ledger at {location}: got {_first_line(error)}; try `--engine spark`"
        ) from error
    finally:
        connection.close()


def _connect(location: Location) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config=_CONFIG)
    connection.create_function("repaired_text", _repaired_text, ["BLOB"], "VARCHAR")
    connection.execute(_SETUP)
    for table in TABLES:
        connection.register(f"{table}_as_stored", _dataset(location, table))
        columns = "* REPLACE (text_of(key) AS key)" if "key" in COLUMNS[table] else "*"
        connection.execute(f"CREATE VIEW {table} AS SELECT {columns} FROM {table}_as_stored")  # noqa: S608  # ours
    for view in VIEWS:
        connection.execute(f"CREATE VIEW {view} AS {view_sql(view)}")
    return connection


def _dataset(location: Location, table: str) -> Any:  # noqa: ANN401  # pyarrow's, which has no types
    folder = location.local_folder
    if folder is None:
        raise LedgerError(
            f"cannot read the ledger at {location} without Spark: got no local folder; use `--engine spark` or "
            "`kmq_spark.ledger.open_ledger`"
        )
    name = location.sql_name(table)
    if not (folder / table / "_delta_log").is_dir():
        raise missing_table_error(location, table)
    try:
        found = DeltaTable(folder / table)
        properties = found.metadata().configuration
        check_version(name, properties.get(VERSION_PROPERTY))
        if properties.get("delta.columnMapping.mode", "none") != "none":
            # An Arrow dataset finds columns by name. With column mapping, the names in the files differ.
            raise LedgerError(
                f"cannot read {name} without Spark: got a table with column mapping; use `--engine spark`"
            )
        check_columns(table, name, {field.name: _sql_type(field.type) for field in found.schema().fields})
        return found.to_pyarrow_dataset()
    except (DeltaError, OSError) as error:
        raise LedgerError(
            f"cannot read {name} without Spark: got {_first_line(error)}; use `--engine spark`"
        ) from error


def _sql_type(kind: Any) -> str:  # noqa: ANN401  # one of deltalake's three classes of types
    element = getattr(kind, "element_type", None)
    if element is not None:
        return f"array<{_sql_type(element)}>"
    name = getattr(kind, "type", "")
    return _TYPES.get(name, name)


def _repaired_text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _of_queue(queue: str) -> tuple[str, list[str]]:
    if not queue:
        return "true", []
    name, group = queue_and_group(queue)
    return ("queue = ?", [name]) if group is None else ("queue = ? AND group_name = ?", [name, group])


def _history_query(
    connection: duckdb.DuckDBPyConnection, queue: str, message: MessageId, limit: int
) -> tuple[str, Sequence[object]]:
    """
    Return the query of a message's history. It first finds the first copy of the message, by which the view is
    filtered.
    """
    name, group = queue_and_group(queue)
    # Fetch all rows, although there is only one: DuckDB accepts no other query before the last row was fetched.
    found = connection.execute(
        "SELECT origin_partition, origin_offset FROM messages "
        "WHERE queue = ? AND queue_partition = ? AND message_offset = ?",
        [name, *message],
    ).fetchall()
    origin = found[0] if found else message
    where, values = "queue = ? AND origin_partition = ? AND origin_offset = ?", [name, *origin]
    if group is not None:
        where, values = f"{where} AND (group_name IS NULL OR group_name = ?)", [*values, group]
    # `at` is a keyword in DuckDB.
    order = f'ORDER BY "at", message_offset, step LIMIT {limit:d}'
    return f"SELECT * EXCLUDE ({_OMITTED_FROM_HISTORY}) FROM message_story WHERE {where} {order}", values  # noqa: S608  # ours


def _rows(connection: duckdb.DuckDBPyConnection, query: str, values: Sequence[object]) -> list[dict[str, Any]]:
    # Convert through Arrow: DuckDB's own conversion of instants needs pytz.
    rows: list[dict[str, Any]] = connection.sql(query, params=list(values)).to_arrow_table().to_pylist()
    return [{name: int(value) if isinstance(value, Decimal) else value for name, value in row.items()} for row in rows]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
