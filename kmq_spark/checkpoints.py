"""
Checkpoints that are damaged, or of a topic that is gone: tell them from other failures, and put them aside.

Rule 1: nothing is deleted: a damaged checkpoint is renamed, for whoever wants to know what happened.
Rule 2: local file systems only; elsewhere the operator is told what to do.
Rule 3: starting with an empty checkpoint is always right: the state is rebuilt from the markers topic, and nothing is
decided before the log was read to its end (`ResumePoint.decide_from`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

logger = logging.getLogger(__name__)

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


def forget_another_topic(checkpoint: str) -> None:
    """
    Put a checkpoint aside that is of a topic that is gone, where there is one; of local file systems only.

    Spark looks at offsets alone: where the new topic is as long as the old one was, it waits for ever, and where it is
    longer, it passes over what lies below.

    Args:
        checkpoint: Folder of one query's checkpoint.
    """
    if urlparse(checkpoint).scheme in ("", "file"):
        put_aside(checkpoint)


def put_aside(checkpoint: str) -> Path | None:
    """
    Rename a damaged checkpoint, so that the next start begins with an empty one.

    Args:
        checkpoint: Folder of one query's checkpoint.

    Returns:
        Its new name; None where there is nothing to rename, or the folder is on another than a local file system.
    """
    url = urlparse(checkpoint)
    if url.scheme not in ("", "file"):
        logger.error(
            "checkpoint %s cannot be used; move it away and start the tracker again: it is rebuilt from the markers",
            checkpoint,
            extra={"action": "checkpoint_damaged"},
        )
        return None
    folder = Path(url.path if url.scheme else checkpoint)
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(aside)
    logger.error(
        "checkpoint %s cannot be used: it is now %s, and the state is rebuilt from the markers topic",
        folder,
        aside,
        extra={"action": "checkpoint_damaged"},
    )
    return aside
