"""The generated module is what marker.proto says, and works with every protobuf runtime of our bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmq_spark.wire import generate, marker_pb2


def test_generated_module_is_current() -> None:
    """A change of marker.proto needs a run of the generator."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    assert generate.main(["--check"]) == 0


def test_generated_module_uses_the_public_api_alone() -> None:
    """What protoc writes would refuse every runtime older than protoc."""
    assert "runtime_version" not in Path(marker_pb2.__file__).read_text("utf-8")


def test_no_field_number_of_kafka_mq_go_has_moved() -> None:
    """Fields 1 to 6 are theirs."""
    fields = {field.name: field.number for field in marker_pb2.DESCRIPTOR.message_types_by_name["Marker"].fields}
    theirs = {"version": 1, "type": 2, "message_id": 3, "redeliver_after_ms": 4, "key": 5, "value": 6}
    assert theirs == {name: number for name, number in fields.items() if number <= 6}


def test_generator_writes_what_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Module and types, beside marker.proto; what is out of date is reported."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    committed = Path(marker_pb2.__file__)
    folder = tmp_path / "kmq_spark" / "wire"
    folder.mkdir(parents=True)
    (folder / "marker.proto").write_text((committed.parent / "marker.proto").read_text("utf-8"), "utf-8")
    monkeypatch.setattr(generate, "WIRE_FOLDER", folder)
    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert (folder / "marker_pb2.py").read_text("utf-8") == committed.read_text("utf-8")
    assert "class Marker" in (folder / "marker_pb2.pyi").read_text("utf-8")


def test_proto_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What protoc says is on stderr."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development dependency")
    monkeypatch.setattr(generate, "WIRE_FOLDER", tmp_path / "kmq_spark" / "wire")
    with pytest.raises(SystemExit):
        generate.main([])
