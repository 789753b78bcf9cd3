"""The two readers of a message's history, `kmq message show` and the view `message_story`, name events alike."""

from __future__ import annotations

from itertools import product

import duckdb
import pytest

from kmq_spark.core.markers import Marker, MarkerType, OffsetRange, Outcome, Release
from kmq_spark.inspection.history import PlacedMarker, copy_event, events_of
from kmq_spark.ledger.marker_rows import DECODED_SCHEMA, _rows_of
from kmq_spark.ledger.queries import view_sql
from kmq_spark.ledger.reader import _SETUP
from kmq_spark.ledger.schema import COLUMNS, DEAD_LETTERS, MARKERS, MESSAGES
from kmq_spark.wire.codec import encode_marker
from kmq_spark.wire.headers import ORIGIN, PREVIOUS

RANGES = (OffsetRange(0, 1),)
WRITTEN = [
    *(Marker(MarkerType.START, 0, RANGES, 30_000, never_handed_out=deferred) for deferred in (False, True)),
    *(Marker(MarkerType.END, 0, RANGES, outcome=outcome) for outcome in Outcome),
    *(
        Marker(MarkerType.KEEPALIVE, 0, RANGES, after_ms, release=release, never_handed_out=unseen)
        for release, after_ms, unseen in product(Release, (0, 5_000), (False, True))
    ),
]
"""Every kind of marker of a message."""


def ask(marker: Marker | None, *, is_first_copy: bool = True, previous_offset: int | None = None) -> str:
    """Return the event that the view shows for a marker, or for a copy."""
    connection = duckdb.connect()
    connection.execute(_SETUP.split("CREATE MACRO text_of")[0])
    for table in (MESSAGES, MARKERS, DEAD_LETTERS):
        columns = ", ".join(
            f"{name} {kind.replace('array<timestamp>', 'timestamp[]').replace('string', 'varchar')}"
            for name, kind in COLUMNS[table].items()
        )
        connection.execute(f"CREATE TABLE {table} ({columns})".replace("binary", "blob"))
    connection.execute(
        "INSERT INTO messages (queue, queue_partition, message_offset, is_first_copy, previous_offset, key) "
        "VALUES ('orders', 0, 0, ?, ?, 'k'::BLOB)",
        [is_first_copy, previous_offset],
    )
    if marker is not None:
        (row,) = _rows_of(0, 0, 0, encode_marker(marker))
        decoded = dict(zip((column.split()[0] for column in DECODED_SCHEMA.split(", ")), row, strict=True))
        values = {"queue": "orders"} | {name: value for name, value in decoded.items() if name in COLUMNS[MARKERS]}
        marks = ", ".join("?" * len(values))
        connection.execute(f"INSERT INTO markers ({', '.join(values)}) VALUES ({marks})", list(values.values()))  # noqa: S608  # ours
    step = "step = 0" if marker is None else "step > 0"
    found = connection.execute(f"SELECT event FROM ({view_sql('message_story')}) WHERE {step}").fetchall()  # noqa: S608  # ours
    return str(found[0][0])


@pytest.mark.parametrize("marker", WRITTEN, ids=str)
def test_marker_has_the_same_event_in_the_ledger_and_in_message_show(marker: Marker) -> None:
    (shown,) = events_of("orders.markers", [PlacedMarker(0, 0, 0, marker)])
    assert shown.what.split(", ")[0] == ask(marker)


@pytest.mark.parametrize(
    ("headers", "previous_offset"),
    [([], None), ([(ORIGIN, b"0:3")], None), ([(ORIGIN, b"0:3"), (PREVIOUS, b"0:7")], 7)],
)
def test_copy_has_the_same_event_in_the_ledger_and_in_message_show(
    headers: list[tuple[str, bytes]], previous_offset: int | None
) -> None:
    """A first copy, a redriven one, and one that the tracker has sent."""
    shown = copy_event(0, "orders[0]@9", [*headers], 1)
    assert shown.what == f"{ask(None, is_first_copy=not headers, previous_offset=previous_offset)}, copy 2"
