"""The schema of a ledger, for Spark that writes it and DuckDB that reads it: tables, columns, version, location."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from kmq_spark.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from kmq_spark.config import LedgerSettings

VERSION = 1
"""Version of the schema; stored in each table's property `kmq.ledger.version`."""

VERSION_PROPERTY = "kmq.ledger.version"

MARKERS, MESSAGES, DEAD_LETTERS = TABLES = ("markers", "messages", "dead_letters")

COLUMNS: dict[str, dict[str, str]] = {
    MARKERS: {
        "queue": "string",
        "subscription": "string",
        "marker_date": "date",
        "marker_partition": "int",
        "marker_offset": "bigint",
        "range_index": "int",
        "appended_at": "timestamp",
        "kind": "string",
        "event": "string",
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
        "for_subscription": "string",
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
        "subscription": "string",
        "dead_date": "date",
        "dead_letter_partition": "int",
        "dead_letter_offset": "bigint",
        "dead_at": "timestamp",
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
}
"""Columns of each table with their SQL types, in order."""

DATE_COLUMNS = {MARKERS: "marker_date", MESSAGES: "sent_date", DEAD_LETTERS: "dead_date"}
"""Partition column of each table: the UTC day of the record's append time."""

_CATALOG_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?")


@dataclass(frozen=True, slots=True)
class Location:
    """
    The location of a ledger: a folder (a path, or a URL that Spark supports), or a schema of a catalog.

    A relative path is made absolute: Delta's SQL treats ``delta.`ledger/markers` `` as a table in a catalog.
    """

    folder: str = ""
    catalog: str = ""

    def __post_init__(self) -> None:
        # The names become parts of SQL text.
        if bool(self.folder) == bool(self.catalog):
            raise ConfigError(
                f"the location of the ledger is ambiguous: got folder {self.folder!r} and catalog {self.catalog!r}; "
                "expected one of them; set [ledger] dir or catalog"
            )
        if "`" in self.folder or (self.catalog and not _CATALOG_NAME.fullmatch(self.catalog)):
            raise ConfigError(
                f"location of the ledger is not allowed: got {str(self)!r}; expected a folder without '`', or "
                "catalog.schema of A-Z a-z 0-9 _ -; correct [ledger] dir or catalog"
            )
        if self.folder and not urlparse(self.folder).scheme:
            object.__setattr__(self, "folder", str(Path(self.folder).absolute()))

    def __str__(self) -> str:
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


def location_of(settings: LedgerSettings) -> Location:
    """Return the location of the ledger according to the settings."""
    return Location("" if settings.catalog else settings.dir, settings.catalog)


def missing_table_error(location: Location, table: str) -> LedgerError:
    """Return the error for a table that does not exist."""
    return LedgerError(
        f"no ledger at {location}: got no Delta table {location.sql_name(table)}; correct [ledger] dir or catalog, or "
        "create a ledger with `kmq ledger run QUEUE`"
    )


def check_version(name: str, version: str | None) -> None:
    """Check the version of a table's schema: its property `kmq.ledger.version`, None if it has none."""
    if version is None:
        raise LedgerError(
            f"table is not part of a ledger: {name} has no property {VERSION_PROPERTY}; choose another [ledger] dir or "
            "catalog, this table is not changed"
        )
    if version != str(VERSION):
        raise LedgerError(
            f"ledger table has another version: got {version} of {name}; expected {VERSION}; read it with the version "
            "of kmq-spark that wrote it, or start a new ledger"
        )
