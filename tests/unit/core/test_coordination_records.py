"""The bounds of coordination records, to the byte, and the names of fleets."""

from __future__ import annotations

from typing import Any

import pytest

from kmq_spark.core.coordination.records import (
    MAX_ENTRIES,
    MAX_GROUP_CHARS,
    MAX_METADATA_BYTES,
    MAX_PAYLOAD_BYTES,
    Assignment,
    HeldPosition,
    Record,
    RecordType,
    fleet_group,
    record_fault,
)
from kmq_spark.errors import ConfigError


def fault(kind: RecordType, **fields: Any) -> str:
    """Return what is wrong with a record of a member."""
    return record_fault(Record(kind, "a", "a1", **fields))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RecordType.JOIN, {"heartbeat_ms": 100, "metadata": bytes(MAX_METADATA_BYTES)}),
        (RecordType.HEARTBEAT, {"positions": (HeldPosition("r", 0, 0),) * MAX_ENTRIES}),
        (RecordType.ADD_TASK, {"resource": "t", "payload": bytes(MAX_PAYLOAD_BYTES)}),
        (RecordType.ASSIGN, {"assignments": (Assignment("t", ""),) * MAX_ENTRIES}),
    ],
)
def test_record_at_its_bounds_is_allowed(kind: RecordType, fields: dict[str, Any]) -> None:
    assert fault(kind, **fields) == ""


def test_first_fault_is_reported_though_there_are_others() -> None:
    assert fault(RecordType.RELEASE, resource="", epoch=0, position=0).startswith("resource is empty")
    assert fault(RecordType.RELEASE, resource="r", epoch=-1, position=0).startswith("epoch is out of bounds")
    assert fault(RecordType.ADD_TASK, resource="", payload=b"x").startswith("resource is empty")
    assert fault(RecordType.CLAIM_MESSAGES, resource="r", epoch=-1).startswith("epoch is out of bounds")


LONGEST = MAX_GROUP_CHARS - len("kmq.fleet.")


@pytest.mark.parametrize("name", ["a", "eu-1.b_C", "x" * LONGEST])
def test_fleet_has_a_group_that_no_other_program_has(name: str) -> None:
    assert fleet_group(name) == f"kmq.fleet.{name}"


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * (LONGEST + 1)])
def test_fleet_name_that_is_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_group(name)
    expected = f"expected 1 to {LONGEST} of A-Z a-z 0-9 . _ -; choose another name"
    assert str(caught.value) == f"fleet name is not allowed: got {name!r:.80}; {expected}"
