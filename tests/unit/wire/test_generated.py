"""The generated module is what marker.proto says, and works with every protobuf runtime of our bounds."""

from __future__ import annotations

from pathlib import Path

from kmq_spark.wire import marker_pb2


def test_generated_module_uses_the_public_api_alone() -> None:
    """What protoc writes would refuse every runtime older than protoc."""
    assert "runtime_version" not in Path(marker_pb2.__file__).read_text("utf-8")


def test_no_field_number_of_kafka_mq_go_has_moved() -> None:
    """Fields 1 to 6 are theirs."""
    fields = {field.name: field.number for field in marker_pb2.DESCRIPTOR.message_types_by_name["Marker"].fields}
    theirs = {"version": 1, "type": 2, "message_id": 3, "redeliver_after_ms": 4, "key": 5, "value": 6}
    assert theirs == {name: number for name, number in fields.items() if number <= 6}
