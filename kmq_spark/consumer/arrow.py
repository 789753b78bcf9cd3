"""
A batch as an Arrow table.

Rule 1: pyarrow is imported at the first call only: the consumer works without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kmq_spark.errors import ConfigError
from kmq_spark.wire.headers import PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from confluent_kafka import Message as KafkaMessage


def table_of(records: Sequence[KafkaMessage], delivery_counts: Sequence[int]) -> pa.Table:
    """
    Return records as a table, see `Batch.to_arrow`.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  # optional
    except ImportError as error:
        message = "to_arrow needs pyarrow: got no module pyarrow, 18 or newer; run `pip install pyarrow`"
        raise ConfigError(message) from error
    columns: list[tuple[str, Any, list[Any]]] = [
        ("key", pa.binary(), [record.key() for record in records]),
        ("value", pa.binary(), [record.value() for record in records]),
        (
            "headers",
            pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())])),
            [_headers_of(record) for record in records],
        ),
        ("partition", pa.int32(), [record.partition() for record in records]),
        ("offset", pa.int64(), [record.offset() for record in records]),
        ("appended_at", pa.timestamp("ms", "UTC"), [record.timestamp()[1] for record in records]),
        ("delivery_count", pa.int32(), list(delivery_counts)),
    ]
    return pa.table(
        [pa.array(values, kind) for _, kind, values in columns],
        schema=pa.schema([(name, kind) for name, kind, _ in columns]),
    )


def _headers_of(record: KafkaMessage) -> list[dict[str, Any]]:
    headers: Any = record.headers()
    return [{"name": name, "value": value} for name, value in headers or () if not name.startswith(PREFIX)]
