"""
Checkpoints that are damaged, or of a topic that is gone: tell them from other failures.

Rule 1: starting with an empty checkpoint is always right: the state is rebuilt from the markers topic, and nothing is
decided before the log was read to its end (`ResumePoint.decide_from`).
"""

from __future__ import annotations

from typing import Any

DAMAGE_MARKS = (
    # Spark's error classes for a state store that cannot be loaded, and for logs of a checkpoint that cannot be read.
    "CANNOT_LOAD_STATE_STORE",
    "STATE_STORE_",
    "CHECKPOINT_",
    "INVALID_CHECKPOINT",
    "MALFORMED_",
    "Malformed log file",
    "Incomplete log file",
    "UNSUPPORTED_LOG_VERSION",
    "FAILED_READ_FILE",
    "Error reading delta file",
    "Error reading snapshot file",
    "Error reading streaming state file",
    "log file was malformed",
    "batch metadata",
    "BATCH_METADATA",
    # What lies below them.
    "ChecksumException",
    "Checksum error",
    "checksum mismatch",
    "RocksDBException",
    "ZipException",
    "JsonParseException",
    "JsonEOFException",
    "Unexpected end-of-input",
    "Stream is corrupted",
    # Our own blob.
    "StateError",
)
"""Texts in the error of a query whose checkpoint is damaged; none of them is in the error of a lost broker."""


READERS = (
    "HDFSMetadataLog",
    "OffsetSeqLog",
    "CommitLog",
    "StreamMetadata",
    "OperatorStateMetadata",
    "StateSchemaCompatibilityChecker",
    "StateStoreChangelog",
    "RocksDBFileManager",
)
"""Classes of Spark that read a checkpoint: an exception thrown below them needs no text, and often has none."""

TOPIC_SHRANK = "offset was changed from"
"""What Spark's Kafka source says of a partition that ends before the place where the checkpoint stands."""

FRAMES = 12
"""How far below such a class a reader of bytes may stand."""


def is_damaged(error: BaseException) -> bool:
    """Return whether an error of a query says that its checkpoint cannot be read."""
    seen: BaseException | None = error
    while seen is not None:
        texts = [f"{type(seen).__name__}: {seen}", *_told_by_java(seen)]
        if any(mark in text for text in texts for mark in DAMAGE_MARKS):
            return True
        seen = seen.__cause__
    return any(reader in frame for frame in _deepest_frames(error) for reader in READERS)


def is_of_another_topic(error: BaseException) -> bool:
    """Return whether a query stopped since its topic is shorter than its checkpoint says: it was made anew."""
    return any(TOPIC_SHRANK in text for text in (str(error), *_told_by_java(error)))


def _told_by_java(error: BaseException) -> list[str]:
    """Return what the Java exceptions behind an error of PySpark say; nothing where there are none."""
    return [str(throwable.toString()) for throwable in _throwables(error)]


def _deepest_frames(error: BaseException) -> list[str]:
    """Return the classes that stood nearest to the first cause."""
    throwables = _throwables(error)
    if not throwables:
        return []
    return [str(frame.getClassName()) for frame in list(throwables[-1].getStackTrace())[:FRAMES]]


def _throwables(error: BaseException) -> list[Any]:
    """Return the chain of Java exceptions behind an error of PySpark, the first cause last."""
    # PySpark keeps it here, since 3.4, and offers no other way to it.
    throwable = getattr(error, "_origin", None)
    found: list[Any] = []
    while throwable is not None:
        found.append(throwable)
        throwable = throwable.getCause()
    return found
