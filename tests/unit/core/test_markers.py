"""The text form of a message's identity."""

from __future__ import annotations

import pytest

from kmq_spark.core.markers import MAX_MESSAGE_OFFSET, MAX_QUEUE_PARTITION, MessageId

LARGEST = MessageId(MAX_QUEUE_PARTITION, MAX_MESSAGE_OFFSET)


@pytest.mark.parametrize("message_id", [MessageId(0, 0), MessageId(3, 18_842), LARGEST])
def test_text_is_read_as_it_was_written(message_id: MessageId) -> None:
    """In a header and on the command line."""
    assert message_id.text == f"{message_id.queue_partition}:{message_id.message_offset}"
    assert MessageId.parse(message_id.text) == MessageId.parse(message_id.text.encode()) == message_id


@pytest.mark.parametrize(
    "text",
    [
        None, "", b"", ":", "3", "3:", ":7", "x:7", "3:y", "-1:7", "3:-7", " 3:7", "3:7\n", "3:7:1", b"3:7\xff", "٣:7",
        f"{MAX_QUEUE_PARTITION + 1}:7", f"3:{MAX_MESSAGE_OFFSET + 1}", "3:" + "9" * 5_000,
    ],
)  # fmt: skip
def test_anything_else_is_none(text: str | bytes | None) -> None:
    assert MessageId.parse(text) is None
