"""
The checkpoint folder of a tracker's query, on any file system that Spark's JVM can write.

Rule 1: it is always correct to start with an empty checkpoint: the state is rebuilt from the markers topic.
Rule 2: a checkpoint that cannot be used is renamed. Only one that is out of date is deleted.

Source: Hadoop's `FileSystem`, with which Spark itself writes checkpoints.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from kmq_spark.failpoints import failpoint
from kmq_spark.spark.queries import one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kmq_spark.kafka.positions import ResumePoint
    from kmq_spark.kafka.queue_topics import QueueTopics

logger = logging.getLogger(__name__)

TOPIC_ID_FILE = "kmq-topic-id"
"""File that contains the id of the markers topic to which the checkpoint belongs."""


class Checkpoint:
    """The checkpoint folder of one query, which may not exist; *path* without a scheme is on Spark's default one."""

    def __init__(self, path: str, spark: SparkSession) -> None:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # no other way to Hadoop's file systems
        self.path = path.rstrip("/")
        self._path_of = jvm.org.apache.hadoop.fs.Path
        self._files: Any = self._path_of(path).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001  # as above

    def prepare(self, resume: ResumePoint, topics: QueueTopics, *, must_be_whole: bool) -> None:
        """Rename the checkpoint if it is of another topic; delete it without a batch, or if a rebuild is quicker."""
        known_id = self._read(TOPIC_ID_FILE).strip()
        is_of_topic = bool(known_id) and known_id == resume.topic_id and not resume.is_other_topic
        if must_be_whole:
            has_batches = is_of_topic and self._newest_batch("commits") >= 0
            resume.check_nothing_removed(topics.markers_topic, has_checkpoint=has_batches)
        if not is_of_topic and (known_id or resume.is_other_topic or resume.has_no_position):
            # Spark compares only offsets. If the new topic is as long as the old one was, Spark waits for new markers;
            # if it is longer, Spark skips the markers below the checkpoint's offset.
            self.rename()
        elif self._newest_batch("offsets") >= 0 and self._newest_batch("commits") < 0:
            # It has no state, and Spark would read from where its planned batch begins, with the rules and the clock of
            # where this tracker begins.
            self.delete()
        elif self._is_out_of_date(resume):
            logger.info(
                "checkpoint %s is out of date: the state is rebuilt from the markers topic, which is quicker",
                self.path, extra={"action": "checkpoint_out_of_date", "queue": str(topics)},
            )  # fmt: skip
            self.delete()
        if resume.topic_id and self._read(TOPIC_ID_FILE).strip() != resume.topic_id:
            self._write(TOPIC_ID_FILE, resume.topic_id)

    def rename(self) -> None:
        """Rename the folder, so that the next start begins with an empty one."""
        aside, number = "", 1
        try:
            if not self._files.exists(self._path_of(self.path)):
                return
            while self._files.exists(self._path_of(aside := f"{self.path}.damaged-{number}")):
                number += 1
            is_renamed = self._files.rename(self._path_of(self.path), self._path_of(aside))
            why = "the file system refused it"
        except (Py4JError, PySparkException) as error:
            is_renamed, why = False, one_line(error)
        if is_renamed:
            failpoint("tracker.checkpoint-renamed")
            logger.error(
                "checkpoint %s cannot be used and was renamed to %s; rebuilding the state from the markers topic",
                self.path, aside, extra={"action": "checkpoint_damaged"},
            )  # fmt: skip
        else:
            logger.error(
                "checkpoint %s cannot be used and cannot be renamed: %s; move it away and restart the tracker, which "
                "then rebuilds its state from the markers topic",
                self.path, why, extra={"action": "checkpoint_damaged"},
            )  # fmt: skip

    def delete(self) -> None:
        """Delete the folder; a failure is logged."""
        try:
            self._files.delete(self._path_of(self.path), True)  # noqa: FBT003  # Hadoop's: recursive
        except (Py4JError, PySparkException) as error:
            logger.warning("cannot delete checkpoint %s: %s", self.path, one_line(error))

    def _is_out_of_date(self, resume: ResumePoint) -> bool:
        """
        Return whether a rebuild of the state is quicker than a start from the checkpoint, and as complete.

        A rebuild loads no state, so it is quicker if it reads fewer markers. In a fleet it is, if another process has
        tracked the queue since the checkpoint was written.
        """
        if not (read_to := self._read_to()) or resume.removed or resume.unproven_gaps or resume.has_no_position:
            return False
        if any(at.needed_offset < resume.starting_offsets[partition] for partition, at in resume.positions.items()):
            # Retention removed a marker of a message that is still in flight: only the checkpoint knows this message.
            return False
        return sum(start - read_to.get(partition, 0) for partition, start in resume.starting_offsets.items()) > 0

    def _read_to(self) -> dict[int, int]:
        """Return the first marker that no planned batch has read, by markers partition; empty where that is unknown."""
        newest = self._newest_batch("offsets")
        # Lines: the version, metadata, then one line per source.
        lines = self._read(f"offsets/{newest}").splitlines() if newest >= 0 else []
        try:
            by_topic = json.loads(lines[2])
            return {int(partition): int(at) for of_topic in by_topic.values() for partition, at in of_topic.items()}
        except (IndexError, ValueError, AttributeError):
            return {}

    def _newest_batch(self, log: str) -> int:
        """Return the newest batch in one of Spark's logs, `offsets` or `commits`; -1 where there is none."""
        folder = self._path_of(f"{self.path}/{log}")
        try:
            names = [str(each.getPath().getName()) for each in self._files.listStatus(folder)]
        except (Py4JError, PySparkException):
            return -1
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _read(self, name: str) -> str:
        """Return the text of a small file in the folder; empty where there is none or it cannot be read."""
        path = self._path_of(f"{self.path}/{name}")
        try:
            if not self._files.exists(path):
                return ""
            stream = self._files.open(path)
            try:
                return bytes(stream.readAllBytes()).decode()
            finally:
                stream.close()
        except (UnicodeDecodeError, Py4JError, PySparkException) as error:
            logger.warning("cannot read %s of checkpoint %s: %s", name, self.path, one_line(error))
            return ""

    def _write(self, name: str, text: str) -> None:
        try:
            stream = self._files.create(self._path_of(f"{self.path}/{name}"), True)  # noqa: FBT003  # Hadoop's: overwrite
            stream.write(bytearray(text.encode()))
            stream.close()
        except (Py4JError, PySparkException) as error:
            logger.warning("cannot write %s of checkpoint %s: %s", name, self.path, one_line(error))
