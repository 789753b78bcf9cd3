"""
The position records of producers that resume: bytes of the topic `<queue>.producers`.

Key = producer id, value = one JSON object: `version`, `generation`, `sequence`, `position` or `position_base64`
(bytes), `at` (epoch milliseconds), `by`. No value (a tombstone): the id was forgotten.

Rule 1: a JSON position comes back equal to what was given; what JSON would change (tuples, keys that are no text) is
refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from kmq_spark.core.producing import MAX_COUNT, ProducerState, SourcePosition
from kmq_spark.errors import ConfigError, MalformedRecordError, UnsupportedVersionError

VERSION = 1

MAX_POSITION_BYTES = 4_096
"""Largest position: bytes as they are, JSON as UTF-8 text without spaces."""

MAX_RECORD_BYTES = 16_384
"""Largest value that is read: a position of 4 KiB in Base64 and the other fields take 6 KiB."""

_MAX_BY_CHARS = 1_000
_SHOWN_CHARS = 60
_JSON_KINDS = (str, int, float, list, dict)


def encode_state(state: ProducerState) -> bytes:
    """Return the value of a position record."""
    name, text = _encoded(state.position)
    # Written by hand around the position, which is JSON already.
    return (
        f'{{"version":{VERSION},"generation":{state.generation},"sequence":{state.sequence},'
        f'"{name}":{text},"at":{state.at_ms},"by":{json.dumps(state.by)}}}'
    ).encode()


def _encoded(position: SourcePosition) -> tuple[str, str]:
    """Return the name of a position's JSON member, and its value as JSON text."""
    if isinstance(position, bytes):
        _check_size(len(position))
        return "position_base64", f'"{base64.b64encode(position).decode("ascii")}"'
    if position is not None and not isinstance(position, _JSON_KINDS):
        raise _no_json(position, f"it is of type {type(position).__name__}")
    try:
        text = json.dumps(position, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
        if size <= MAX_POSITION_BYTES and json.loads(text) != position:
            raise _no_json(position, "JSON has no tuples, and its keys are text")
    except UnicodeEncodeError:
        raise _no_json(position, "it holds text that is no UTF-8") from None
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _no_json(position, str(error)[:_SHOWN_CHARS]) from None
    _check_size(size)
    return "position", text


def decode_state(value: bytes, *, topic: str = "", partition: int = -1, offset: int = -1) -> ProducerState:
    """Read the value of a position record."""
    place: Any = {"topic": topic, "partition": partition, "offset": offset}
    where = f"position record at {topic}[{partition}]@{offset}"
    if len(value) > MAX_RECORD_BYTES:
        raise MalformedRecordError(f"{where} is too large: got {len(value)} bytes, at most {MAX_RECORD_BYTES}", **place)
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedRecordError(f"{where} is not JSON: got {value[:_SHOWN_CHARS]!r}", **place) from error
    if not isinstance(fields, dict) or not _is_count(fields.get("version"), 1):
        raise MalformedRecordError(f"{where} has no version: got {value[:_SHOWN_CHARS]!r}", **place)
    if fields["version"] > VERSION:
        message = (
            f"cannot read {where}: version {fields['version']}, this build reads up to {VERSION}; upgrade this program"
        )
        raise UnsupportedVersionError(message, **place)
    for name, least in (("generation", 1), ("sequence", 0), ("at", 0)):
        if not _is_count(fields.get(name), least):
            message = f"{where} has no valid {name}: got {fields.get(name)!r}, a number from {least} on"
            raise MalformedRecordError(message, **place)
    by, position = fields.get("by", ""), fields.get("position")
    if not isinstance(by, str) or len(by) > _MAX_BY_CHARS:
        raise MalformedRecordError(f"{where} has no valid by: got {str(by)[:_SHOWN_CHARS]!r}, a text", **place)
    if "position_base64" in fields:
        try:
            position = base64.b64decode(fields["position_base64"], validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise MalformedRecordError(f"{where} has a position that is not Base64", **place) from error
    return ProducerState(fields["generation"], fields["sequence"], position, fields["at"], by)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_COUNT


def _check_size(size: int) -> None:
    if size > MAX_POSITION_BYTES:
        message = (
            f"position is too large: got {size} bytes, at most {MAX_POSITION_BYTES}; "
            "store a reference to the position of the source"
        )
        raise ConfigError(message)


def _no_json(position: object, why: str) -> ConfigError:
    try:
        shown = repr(position)[:_SHOWN_CHARS]
    except (RecursionError, ValueError):
        shown = type(position).__name__
    return ConfigError(
        f"position is neither bytes nor JSON: got {shown}, {why}; use text, numbers, lists and dicts with text keys"
    )
