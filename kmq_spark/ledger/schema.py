"""
The schema of a ledger, for all engines: its tables, their columns and version, and its location.

Rule 1: This module loads neither Spark nor DuckDB. The caller passes in what its engine found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from kmq_spark.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
"""Version of the schema; stored in each table's property `kmq.ledger.version`."""

VERSION_PROPERTY = "kmq.ledger.version"

MARKERS, MESSAGES, DEAD_LETTERS, COORDINATION = TABLES = ("markers", "messages", "dead_letters", "coordination")

COLUMNS: dict[str, dict[str, str]] = {
    MARKERS: {
        "queue": "string",
        "group_name": "string",
        "marker_date": "date",
        "marker_partition": "int",
        "marker_offset": "bigint",
        "range_index": "int",
        "appended_at": "timestamp",
        "kind": "string",
        "queue_partition": "int",
        "first_offset": "bigint",
        "message_count": "bigint",
        "redeliver_after_ms": "bigint",
        "due_at": "timestamp",
        "delivery_count": "int",
        "outcome": "string",
        "reason": "string",
        "release": "string",
        "never_handed_out": "boolean",
        "consumer_id": "string",
        "error": "string",
    },
    MESSAGES: {
        "queue": "string",
        "sent_date": "date",
        "queue_partition": "int",
        "message_offset": "bigint",
        "sent_at": "timestamp",
        "origin_partition": "int",
        "origin_offset": "bigint",
        "previous_partition": "int",
        "previous_offset": "bigint",
        "first_sent_at": "timestamp",
        "is_first_copy": "boolean",
        "delivery_count": "int",
        "silent_count": "int",
        "logical_queue": "string",
        "for_group": "string",
        "delay_ms": "bigint",
        "not_before": "timestamp",
        "ttl_ms": "bigint",
        "expires_at": "timestamp",
        "key": "binary",
        "value_bytes": "bigint",
        "header_count": "int",
        "producer_id": "string",
        "producer_generation": "bigint",
        "producer_sequence": "bigint",
    },
    DEAD_LETTERS: {
        "queue": "string",
        "group_name": "string",
        "dead_date": "date",
        "dead_letter_partition": "int",
        "dead_letter_offset": "bigint",
        "dead_at": "timestamp",
        "is_marker": "boolean",
        "source_topic": "string",
        "source_partition": "int",
        "source_offset": "bigint",
        "origin_partition": "int",
        "origin_offset": "bigint",
        "reason": "string",
        "delivery_count": "int",
        "first_sent_at": "timestamp",
        "attempts_at": "array<timestamp>",
        "logical_queue": "string",
        "key": "binary",
        "value_bytes": "bigint",
    },
    COORDINATION: {
        "queue": "string",
        "group_name": "string",
        "change_date": "date",
        "coordination_partition": "int",
        "record_offset": "bigint",
        "change_index": "int",
        "appended_at": "timestamp",
        "coordination_group": "string",
        "change": "string",
        "client_id": "string",
        "resource": "string",
        "epoch": "bigint",
    },
}
"""Columns of each table with their SQL types, in order."""

DATE_COLUMNS = {
    MARKERS: "marker_date",
    MESSAGES: "sent_date",
    DEAD_LETTERS: "dead_date",
    COORDINATION: "change_date",
}
"""Partition column of each table: the UTC day of the record's append time."""

_CATALOG_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?")


@dataclass(frozen=True, slots=True)
class Location:
    """
    The location of a ledger: a folder, or a schema of a catalog.

    Attributes:
        folder: Local path, or URL of a file system that Spark supports; empty if the tables are in a catalog. A
            relative path is made absolute: Delta's SQL treats ``delta.`ledger/markers` `` as a table in a catalog.
        catalog: `catalog.schema`, or a schema of the session's catalog; empty if the tables are in a folder.

    Raises:
        ConfigError: Both are set, neither is set, or a name is not allowed.
    """

    folder: str = ""
    catalog: str = ""

    def __post_init__(self) -> None:
        """Validate the names: they become parts of SQL text."""
        if bool(self.folder) == bool(self.catalog):
            message = (
                f"the location of the ledger is ambiguous: got folder {self.folder!r} and catalog {self.catalog!r}, "
                "exactly one is needed; set [ledger] dir or catalog"
            )
            raise ConfigError(message)
        if "`" in self.folder:
            message = f"ledger folder is not allowed: got {self.folder!r}, a path without '`'; choose another"
            raise ConfigError(message)
        if self.catalog and not _CATALOG_NAME.fullmatch(self.catalog):
            message = (
                f"ledger catalog is not allowed: got {self.catalog!r}, catalog.schema of A-Z a-z 0-9 _ -; correct it"
            )
            raise ConfigError(message)
        if self.folder and not urlparse(self.folder).scheme:
            object.__setattr__(self, "folder", str(Path(self.folder).absolute()))

    def __str__(self) -> str:
        """Return the name for log lines and error messages."""
        return self.folder or self.catalog

    @property
    def local_folder(self) -> Path | None:
        """The folder on this machine's disk; None for a catalog and for any other file system."""
        url = urlparse(self.folder)
        if not self.folder or url.scheme not in {"", "file"}:
            return None
        return Path(unquote(url.path) if url.scheme else self.folder)

    def path(self, table: str) -> str:
        """Return the folder of a table; only for a ledger in a folder."""
        return f"{self.folder.rstrip('/')}/{table}"

    def sql_name(self, name: str) -> str:
        """Return the name of a table for SQL."""
        if self.folder:
            return f"delta.`{self.path(name)}`"
        return ".".join(f"`{part}`" for part in (*self.catalog.split("."), name))


def missing_table_error(location: Location, table: str) -> LedgerError:
    """Return the error for a table that does not exist."""
    if table == COORDINATION:
        # It is created last and came with a later version.
        return LedgerError(
            f"ledger is of an older schema: got no Delta table {location.sql_name(table)}; run `kmq ledger maintain "
            "--upgrade`, no existing row is changed"
        )
    return LedgerError(
        f"no ledger at {location}: got no Delta table {location.sql_name(table)}; correct --ledger-dir or --catalog, "
        "or create one with `kmq ledger run QUEUE`"
    )


def check_version(name: str, version: str | None, *, may_be_older: bool = False) -> None:
    """
    Check the version of a table's schema.

    Args:
        name: SQL name of the table.
        version: Its property `kmq.ledger.version`; None if it has none.
        may_be_older: Whether an older version is allowed, because the table is about to be upgraded.

    Raises:
        LedgerError: The table is not part of a ledger, or has another version.
    """
    if version is None or not version.isdecimal():
        raise LedgerError(
            f"table is not part of a ledger: {name} has no property {VERSION_PROPERTY}; use another --ledger-dir or "
            "--catalog, this table is not changed"
        )
    if int(version) > VERSION:
        raise LedgerError(
            f"ledger table is of a newer schema: got version {version} of {name}, this build writes {VERSION}; "
            "upgrade kmq-spark"
        )
    if int(version) < VERSION and not may_be_older:
        raise LedgerError(
            f"ledger table is of an older schema: got version {version} of {name}, this build writes {VERSION}; "
            "run `kmq ledger maintain --upgrade`"
        )


def missing_columns(table: str, name: str, found: Mapping[str, str]) -> list[str]:
    """
    Return the columns that a table lacks.

    Args:
        table: One of `TABLES`.
        name: SQL name of the table.
        found: Columns of the table with their SQL types.

    Raises:
        LedgerError: The type of a column differs from the schema.
    """
    for column, kind in COLUMNS[table].items():
        if found.get(column, kind) != kind:
            raise LedgerError(
                f"ledger table has another schema: got column {column} {found[column]} in {name}, must be {kind}; "
                "use another --ledger-dir or --catalog, this table is not changed"
            )
    return [column for column in COLUMNS[table] if column not in found]


def check_columns(table: str, name: str, found: Mapping[str, str]) -> None:
    """
    Check that a table has every column.

    Raises:
        LedgerError: A column is missing or has another type.
    """
    if missing := missing_columns(table, name, found):
        raise LedgerError(
            f"ledger table is of an older schema: {name} has no column {', '.join(missing)}; "
            "run `kmq ledger maintain --upgrade`, existing rows then have null in it"
        )
