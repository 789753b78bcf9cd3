"""
Manage the checkpoint folder of one query, on any file system that Spark's JVM can write.

The folder contains the id of the markers topic, and of the tracker that used it last. A folder that cannot be used is
renamed.

Rule 1: A checkpoint that cannot be used is renamed. Only one that is out of date is deleted: a rebuild from the markers
topic reads less.
Rule 2: If the folder cannot be renamed, a log line at level ERROR states which folder to move away.

Source: Hadoop's `FileSystem`, with which Spark itself writes checkpoints.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from kmq_spark.failpoints import failpoint
from kmq_spark.spark.queries import one_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

TOPIC_ID_FILE = "kmq-topic-id"
"""File in the checkpoint folder that contains the id of the markers topic to which the checkpoint belongs."""

TRACKER_ID_FILE = "kmq-tracker-id"
"""File in the checkpoint folder that contains the id of the tracker that used the checkpoint last."""


class CheckpointFolder:
    """
    The checkpoint folder of one query; it may not exist.

    Args:
        path: Path or URL of the folder. A path without scheme is local.
        spark: Session whose JVM reads and writes file systems that are not local; None: local file systems only.

    Attributes:
        path: As the argument.
    """

    def __init__(self, path: str, spark: SparkSession | None = None) -> None:
        """Store the path; read nothing yet."""
        self.path = path
        self._spark = spark
        url = urlparse(path)
        self._local = Path(url.path if url.scheme else path) if self._is_local(url.scheme) else None

    def topic_id(self) -> str:
        """Return the id of the checkpoint's markers topic; empty where it is not known."""
        return self._read(TOPIC_ID_FILE)

    def tracker_id(self) -> str:
        """Return the id of the tracker that used the checkpoint last; empty where it is not known."""
        return self._read(TRACKER_ID_FILE)

    def has_batches(self) -> bool:
        """Return whether a batch was committed: without one the checkpoint does not prove that markers were read."""
        try:
            return self._newest_batch("commits") >= 0
        except (OSError, Py4JError, PySparkException) as error:
            logger.warning("cannot list the commits of checkpoint %s: %s", self.path, one_line(error))
            return False

    def write_topic_id(self, topic_id: str) -> None:
        """Write the id of the markers topic to which the checkpoint belongs from now on; empty: write nothing."""
        if topic_id and self.topic_id() != topic_id:
            self._write(TOPIC_ID_FILE, topic_id)

    def write_tracker_id(self, tracker_id: str) -> None:
        """Write the id of the tracker that uses the checkpoint from now on."""
        self._write(TRACKER_ID_FILE, tracker_id)

    def read_to(self) -> dict[int, int]:
        """
        Return the first marker that no planned batch has read, by markers partition.

        Returns:
            Offsets by partition; empty where there is no batch or they cannot be read.
        """
        try:
            text = self._newest_offsets()
            # Lines: the version, metadata, then one line per source.
            _, _, offsets, *_ = text.splitlines() if text else ("", "", "{}")
            by_topic = json.loads(offsets)
            return {int(partition): int(at) for of_topic in by_topic.values() for partition, at in of_topic.items()}
        except (OSError, ValueError, AttributeError, Py4JError, PySparkException) as error:
            logger.warning("cannot read the offsets of checkpoint %s: %s", self.path, one_line(error))
            return {}

    def has_failed_batch(self) -> bool:
        """Return whether the newest batch was not committed. False where that cannot be read."""
        try:
            return self._newest_batch("offsets") > self._newest_batch("commits")
        except (OSError, Py4JError, PySparkException) as error:
            logger.warning("cannot list the batches of checkpoint %s: %s", self.path, one_line(error))
            return False

    def remove(self) -> None:
        """Delete the folder; a failure is logged."""
        try:
            if self._local is not None:
                shutil.rmtree(self._local, ignore_errors=False)
            else:
                _HadoopFolder(self.path, self._spark).remove()
        except (OSError, Py4JError, PySparkException) as error:
            logger.warning("cannot delete checkpoint %s: %s", self.path, one_line(error))

    def rename_damaged(self) -> str | None:
        """
        Rename the folder, so that the next start begins with an empty one.

        Returns:
            The new name; None where the folder does not exist or cannot be renamed.
        """
        try:
            aside = self._rename()
        except (Py4JError, PySparkException) as error:
            logger.error(  # noqa: TRY400  # a JVM stack trace would add nothing
                "checkpoint %s cannot be used and cannot be renamed: %s; move it away and restart the tracker, which "
                "then rebuilds its state from the markers topic",
                self.path, one_line(error), extra={"action": "checkpoint_damaged"},
            )  # fmt: skip
            return None
        if aside is not None:
            failpoint("tracker.checkpoint-renamed")
            logger.error(
                "checkpoint %s cannot be used and was renamed to %s; rebuilding the state from the markers topic",
                self.path, aside, extra={"action": "checkpoint_damaged"},
            )  # fmt: skip
        return aside

    def _read(self, name: str) -> str:
        """Return the text of a small file in the folder; empty where there is none or it cannot be read."""
        try:
            if self._local is not None:
                file = self._local / name
                return file.read_text().strip() if file.exists() else ""
            return _HadoopFolder(self.path, self._spark).read(name).strip()
        except (OSError, UnicodeDecodeError, Py4JError, PySparkException) as error:
            logger.warning("cannot read %s of checkpoint %s: %s", name, self.path, one_line(error))
            return ""

    def _write(self, name: str, text: str) -> None:
        try:
            if self._local is not None:
                self._local.mkdir(parents=True, exist_ok=True)
                (self._local / name).write_text(text)
            else:
                _HadoopFolder(self.path, self._spark).write(name, text)
        except (OSError, Py4JError, PySparkException) as error:
            logger.warning("cannot write %s of checkpoint %s: %s", name, self.path, one_line(error))

    @staticmethod
    def _is_local(scheme: str) -> bool:
        return scheme in ("", "file")

    def _newest_offsets(self) -> str:
        """Return the text of the newest file of the offset log; empty where there is none."""
        newest = self._newest_batch("offsets")
        if newest < 0:
            return ""
        if self._local is None:
            return _HadoopFolder(self.path, self._spark).read(f"offsets/{newest}")
        return (self._local / "offsets" / str(newest)).read_text("utf-8")

    def _newest_batch(self, log: str) -> int:
        """Return the newest batch in one of Spark's logs, `offsets` or `commits`; -1 where there is none."""
        if self._local is None:
            names = _HadoopFolder(self.path, self._spark).names(log)
        else:
            names = [file.name for file in (self._local / log).glob("*")]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _rename(self) -> str | None:
        if self._local is None:
            return _HadoopFolder(self.path, self._spark).rename_damaged()
        if not self._local.exists():
            return None
        number = 1
        while (aside := self._local.with_name(f"{self._local.name}.damaged-{number}")).exists():
            number += 1
        self._local.rename(aside)
        return str(aside)


class _HadoopFolder:
    """A folder on one of Hadoop's file systems; raises the exceptions of py4j and PySpark."""

    def __init__(self, path: str, spark: SparkSession | None) -> None:
        if spark is None or spark.sparkContext._jvm is None:  # noqa: SLF001  # no other way to Hadoop's file systems
            message = "there is no JVM that can access this file system"
            raise Py4JError(message)
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # as above
        self._path_of = jvm.org.apache.hadoop.fs.Path
        self._address = path.rstrip("/")
        self._files: Any = self._path_of(path).getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001  # as above

    def read(self, name: str) -> str:
        path = self._path_of(f"{self._address}/{name}")
        if not self._files.exists(path):
            return ""
        stream = self._files.open(path)
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def names(self, name: str) -> list[str]:
        folder = self._path_of(f"{self._address}/{name}")
        if not self._files.exists(folder):
            return []
        return [str(status.getPath().getName()) for status in self._files.listStatus(folder)]

    def remove(self) -> None:
        self._files.delete(self._path_of(self._address), True)  # noqa: FBT003  # Hadoop's: recursive

    def write(self, name: str, text: str) -> None:
        stream = self._files.create(self._path_of(f"{self._address}/{name}"), True)  # noqa: FBT003  # Hadoop's: overwrite
        stream.write(bytearray(text.encode()))
        stream.close()

    def rename_damaged(self) -> str | None:
        if not self._files.exists(self._path_of(self._address)):
            return None
        number = 1
        while self._files.exists(self._path_of(aside := f"{self._address}.damaged-{number}")):
            number += 1
        if not self._files.rename(self._path_of(self._address), self._path_of(aside)):
            message = f"the file system refused to rename it to {aside}"
            raise Py4JError(message)
        return aside
