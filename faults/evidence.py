"""
Evidence: what a verdict was made from, raw, in files, so that it can be made again without the run.

A folder for each stage:

| file | what |
|---|---|
| `records.jsonl.gz` | every committed record of the queue's topics, as bytes; a JSON array a line, see `RawRecord` |
| `remembered.jsonl.gz` | the same, read before records were removed on purpose; only where that was done |
| `facts.json` | everything else that the checker takes: sessions, bounds, what was away, statuses, exit codes |
| `verdict.json` | what the checker found in the run |
| `*.events.jsonl`, `*.log` | of senders, workers, trackers and the injector |

Rule 1: evidence is written from the same records that the verdict reads: no second read of the topics.
Rule 2: a failure to write it is logged and ends nothing: the campaign continues without it.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from confluent_kafka import Message

logger = logging.getLogger(__name__)

RECORDS, REMEMBERED, FACTS, VERDICT = "records.jsonl.gz", "remembered.jsonl.gz", "facts.json", "verdict.json"
COPIED = ("*.events.jsonl", "*.log")
"""Files of a stage's folder that are evidence too."""

COMPRESSION = 1
"""Payloads are random bytes: more effort gains nothing."""


class RawRecord(NamedTuple):
    """
    A record as the broker gave it.

    In a file it is a JSON array of these fields in this order, bytes in base64.

    Attributes:
        topic: Topic.
        partition: Partition.
        offset: Offset.
        timestamp_type: 0 where there is none, 1 create time, 2 append time.
        timestamp_ms: Epoch milliseconds; negative where there is none.
        key: None where there is none.
        value: The same.
        headers: Name and value, in order; a value may be None.
    """

    topic: str
    partition: int
    offset: int
    timestamp_type: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    @classmethod
    def of(cls, message: Message) -> RawRecord:
        """Return what a client gave us."""
        timestamp_type, timestamp_ms = message.timestamp()
        headers = cast("list[tuple[str, bytes | None]]", message.headers() or [])
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        return cls(*place, timestamp_type, timestamp_ms, message.key(), message.value(), tuple(headers))

    def to_line(self) -> bytes:
        """Return its line in a file."""
        headers = [(name, _text(value)) for name, value in self.headers]
        fields = (*self[:5], _text(self.key), _text(self.value), headers)
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RawRecord:
        """Return the record of a line."""
        topic, partition, offset, timestamp_type, timestamp_ms, key, value, headers = json.loads(line)
        place = topic, partition, offset
        named = tuple((name, _bytes(each)) for name, each in headers)
        return cls(*place, timestamp_type, timestamp_ms, _bytes(key), _bytes(value), named)


def _text(value: bytes | None) -> str | None:
    return None if value is None else b64encode(value).decode()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


class RecordFile:
    """
    Takes records one by one; a failure is logged once, and nothing is written after it.

    Args:
        file: Where they go; None for nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        """Open the file."""
        self._file: gzip.GzipFile | None = None
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                self._file = gzip.open(file, "ab", COMPRESSION)  # noqa: SIM115  # closed by `close`
            except Exception:
                logger.exception("cannot keep records in %s", file)

    def keep(self, record: RawRecord) -> None:
        """Append a record."""
        if self._file is None:
            return
        try:
            self._file.write(record.to_line())
        except Exception:
            logger.exception("cannot keep a record: got an error; no further ones are kept")
            self._file = None

    def close(self) -> None:
        """Write what is buffered."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except Exception:
            logger.exception("cannot close a file of records")


def facts_text(facts: Mapping[str, Any]) -> str:
    """Return facts as JSON."""
    return json.dumps(facts, indent=1, default=_plain)


def keep_rest(target: Path, source: Path, facts: Mapping[str, Any], verdict: Mapping[str, Any]) -> None:
    """
    Write everything of a stage but its records; what fails is logged.

    Args:
        target: Folder of the evidence.
        source: Folder of the stage: event files and logs.
        facts: What goes to `facts.json`.
        verdict: What goes to `verdict.json`.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / FACTS).write_text(facts_text(facts))
        (target / VERDICT).write_text(facts_text(verdict))
        for pattern in COPIED:
            for file in source.glob(pattern):
                _link(file, target / file.name)
    except Exception:
        logger.exception("cannot keep the evidence of %s", source.name)


def _plain(value: Any) -> Any:  # noqa: ANN401  # whatever is no JSON
    """Return a numpy scalar as a number, a path as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _link(file: Path, target: Path) -> None:
    """Give a file a second name, which costs nothing; copy it where the other folder is on another file system."""
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def read_records(file: Path) -> Iterator[RawRecord]:
    """Return the records of a file; none where there is no file."""
    if file.exists():
        with gzip.open(file) as lines:
            yield from map(RawRecord.from_line, lines)
