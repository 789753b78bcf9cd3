"""A message made by hand, for the test of a handler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Message as KafkaMessage

from kmq_spark.consumer.leases import Lease, LeaseTable, Outbox
from kmq_spark.consumer.message import Message
from kmq_spark.core.markers import MessageId
from kmq_spark.producer.options import checked_headers
from kmq_spark.testing.log import START_MS
from kmq_spark.wire.headers import ORIGIN

if TYPE_CHECKING:
    from kmq_spark.kafka.serializers import Deserializer
    from kmq_spark.producer.options import Headers

FOREVER = float("inf")
"""The end of a lease that no time on the machine's clock ends."""


def make_message(
    value: bytes | str | None,
    *,
    key: bytes | str | None = None,
    headers: Headers | None = None,
    delivery_count: int = 1,
    id: MessageId | None = None,  # noqa: A002  # as the property of a message
    origin: MessageId | None = None,
    deserializer: Deserializer | None = None,
) -> Message:
    """
    Return a message that is held, as a handler gets it. Afterwards `settled_by` says what the handler did with it.

    Args:
        value: Payload; text is encoded as UTF-8.
        key: Text is encoded as UTF-8.
        headers: The sender's headers.
        delivery_count: Count of deliveries, including this one.
        id: Queue partition and offset of this copy, by default the first message of partition 0.
        origin: Queue partition and offset of the first copy, by default *id*.
        deserializer: As that of a consumer.
    """
    place = id or MessageId(0, 0)
    pairs: list[tuple[str, bytes | str | None]] = [
        (name, text.encode() if isinstance(text, str) else text) for name, text in checked_headers(headers or ())
    ]
    if origin is not None:
        pairs.append((ORIGIN, origin.text.encode()))
    record = KafkaMessage(
        topic="queue",
        partition=place.queue_partition,
        offset=place.message_offset,
        key=key.encode() if isinstance(key, str) else key,
        value=value.encode() if isinstance(value, str) else value,
        headers=pairs or None,
        timestamp=(2, START_MS),
    )
    lease = Lease(
        outbox=Outbox(place.queue_partition, LeaseTable(deserializer)),
        delivery_count=delivery_count,
        held={place.message_offset},
        renewed_at=0.0,
        ends_at=FOREVER,
        limit_at=FOREVER,
        offsets=(place.message_offset,),
        sizes=(len(record),),
        byte_count=len(record),
    )
    return Message(record, place.message_offset, lease)
