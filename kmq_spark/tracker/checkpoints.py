"""
Decide whether a query can start from its checkpoint: damaged, of a topic that was deleted, or slower than a rebuild.

Rule 1: It is always correct to start with an empty checkpoint. The tracker rebuilds its state from the markers topic
and decides nothing before it has read the log to its end (`ResumePoint.decide_from`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from kmq_spark.spark.queries import text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.tracker.checkpoint_folder import CheckpointFolder

logger = logging.getLogger(__name__)

OUT_OF_DATE_MARKERS = 10_000
"""
A checkpoint that the queue's last tracker used is out of date if a rebuild reads this many markers less. One whose last
batch failed is out of date unless a rebuild reads this many more. The tracker reads them in a second or less.
"""

DAMAGE_TEXTS = (
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
    # The exceptions that cause them.
    "ChecksumException",
    "Checksum error",
    "checksum mismatch",
    "RocksDBException",
    "ZipException",
    "JsonParseException",
    "JsonEOFException",
    "Unexpected end-of-input",
    "Stream is corrupted",
    # Our own decoder of the state.
    "StateError",
)
"""Texts in the error of a query whose checkpoint is damaged. The error of a lost broker connection contains none."""


CHECKPOINT_READERS = (
    "HDFSMetadataLog",
    "OffsetSeqLog",
    "CommitLog",
    "StreamMetadata",
    "OperatorStateMetadata",
    "StateSchemaCompatibilityChecker",
    "StateStoreChangelog",
    "RocksDBFileManager",
)
"""
Spark's classes that read a checkpoint. An exception that is thrown below one of them means damage, whatever its text:
often it has none.
"""

TOPIC_SHRANK = "offset was changed from"
"""Text of the error of Spark's Kafka source when a partition ends before the offset in the checkpoint."""

SEARCHED_FRAMES = 12
"""Stack frames searched for such a class: the exception may be thrown this many calls below it."""


def is_damaged(error: BaseException) -> bool:
    """Return whether the error of a query means that its checkpoint cannot be read."""
    cause: BaseException | None = error
    while cause is not None:
        texts = [f"{type(cause).__name__}: {text_of(cause)}", *_java_texts(cause)]
        if any(damage in text for text in texts for damage in DAMAGE_TEXTS):
            return True
        cause = cause.__cause__
    return any(reader in frame for frame in _deepest_frames(error) for reader in CHECKPOINT_READERS)


def is_of_another_topic(error: BaseException) -> bool:
    """Return whether the topic is shorter than the checkpoint states: the topic was deleted and created again."""
    return any(TOPIC_SHRANK in text for text in (text_of(error), *_java_texts(error)))


def is_out_of_date(
    read_to: Mapping[int, int], tracker_id: str, resume: ResumePoint, *, has_failed_batch: bool = False
) -> bool:
    """
    Return whether a rebuild of the state from the markers topic is quicker than a start from the checkpoint.

    Spark first runs a batch again that was not committed, and that decides nothing: the log was not read to its end.
    A rebuild begins with the batch that decides.

    Args:
        read_to: First marker that the checkpoint has not read, by markers partition; empty if unknown.
        tracker_id: The tracker that used the checkpoint last; empty if unknown. If another tracker has fenced it, its
            last batch was not committed.
        resume: Where a rebuild begins. If markers that it needs were removed, or it has no committed offset, the
            checkpoint is kept.
        has_failed_batch: Whether the last batch was not committed, and its query has ended.
    """
    if not read_to or resume.removed or resume.unproven_gaps or resume.has_no_position:
        return False
    if any(at.needed_offset < resume.starting_offsets[partition] for partition, at in resume.positions.items()):
        # Retention removed a marker of a message that is still in flight: only the checkpoint knows this message.
        return False
    ahead = sum(start - read_to.get(partition, 0) for partition, start in resume.starting_offsets.items())
    # The queue's last tracker may still use its checkpoint, so that one is kept.
    is_of_last_tracker = not tracker_id or any(at.tracker_id == tracker_id for at in resume.positions.values())
    is_to_be_kept = is_of_last_tracker and not has_failed_batch
    return ahead > (OUT_OF_DATE_MARKERS if is_to_be_kept else -OUT_OF_DATE_MARKERS)


def prepare(
    folder: CheckpointFolder, resume: ResumePoint, topics: QueueTopics, *, must_be_whole: bool, has_query_ended: bool
) -> None:
    """
    Rename the checkpoint if it belongs to another topic; delete it if a rebuild is quicker.

    Args:
        folder: The checkpoint.
        resume: Where a rebuild begins.
        topics: Names of the queue.
        must_be_whole: Whether it is an error if retention removed markers before they were read.
        has_query_ended: Whether the query that used the checkpoint last is known to have ended.

    Raises:
        KmqError: Retention removed markers before they were read.
    """
    known_id = folder.topic_id()
    is_of_topic = bool(known_id) and known_id == resume.topic_id and not resume.is_other_topic
    if must_be_whole:
        resume.check_nothing_removed(topics.markers_topic, has_checkpoint=is_of_topic and folder.has_batches())
    if not is_of_topic and (known_id or resume.is_other_topic or resume.has_no_position):
        # Spark compares only offsets. If the new topic is as long as the old one was, Spark waits for new markers; if
        # it is longer, Spark skips the markers below the checkpoint's offset.
        folder.rename_damaged()
        return
    has_failed_batch = has_query_ended and folder.has_failed_batch()
    if is_out_of_date(folder.read_to(), folder.tracker_id(), resume, has_failed_batch=has_failed_batch):
        logger.info(
            "checkpoint %s is out of date: the state is rebuilt from the markers topic, which is quicker",
            folder.path, extra={"action": "checkpoint_out_of_date", "queue": str(topics)},
        )  # fmt: skip
        folder.remove()


def _java_texts(error: BaseException) -> list[str]:
    """Return the texts of the Java exceptions behind an error of PySpark; empty where there are none."""
    return [str(throwable.toString()) for throwable in _throwables(error)]


def _deepest_frames(error: BaseException) -> list[str]:
    """Return the classes of the top stack frames of the root cause."""
    throwables = _throwables(error)
    if not throwables:
        return []
    return [str(frame.getClassName()) for frame in list(throwables[-1].getStackTrace())[:SEARCHED_FRAMES]]


def _throwables(error: BaseException) -> list[Any]:
    """Return the chain of Java exceptions behind an error, the root cause last; none if the JVM has ended."""
    # Since version 3.4 PySpark keeps it in this attribute; there is no public one.
    throwable = getattr(error, "_origin", None)
    found: list[Any] = []
    try:
        while throwable is not None:
            found.append(throwable)
            throwable = throwable.getCause()
    except (Py4JError, ConnectionError):
        return []
    return found
