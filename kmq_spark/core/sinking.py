"""
What a slot of an exactly-once sink has committed, and what of a batch it still has to write.

Rule 1: a sink cuts each batch into slots by a hash of the rows; a slot has a position of its own: the query, the batch,
how many of its rows of that batch are committed, and a digest of them.
Rule 2: a repeated batch is continued behind the rows that are committed. They must be the same rows in the same order,
which the digest shows; other rows are an error: no guess is right for them.
Rule 3: a batch of another query is refused: its numbers begin at 0 again, and comparing them would skip rows silently.

Source: Spark's guide on foreachBatch ("use the batch id"), which leaves lost checkpoints to the reader.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kmq_spark.errors import SinkError

MAX_SLOTS = 1_000


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """What a slot has committed."""

    query: str
    """Id of the streaming query, as its checkpoint has it; `run:<run id>` of a batch job."""
    batch: int
    slots: int
    """Slots of the sink."""
    rows: int
    """Rows of that batch and slot that are committed."""
    digest: str
    """Digest of those rows, in order."""
    is_whole: bool
    """Whether these are all rows of the batch and slot."""

    def to_dict(self) -> dict[str, Any]:
        """Return the position as JSON holds it."""
        return asdict(self)

    @classmethod
    def parse(cls, position: object, where: str) -> SlotPosition:
        """Read the position of a slot; *where* names the slot in the error, here and below."""
        kinds = {"query": str, "batch": int, "slots": int, "rows": int, "digest": str, "is_whole": bool}
        if not isinstance(position, dict) or any(type(position.get(name)) is not kind for name, kind in kinds.items()):
            message = f"position of {where} is not one of a sink: got {position!r}; choose another sink_id"
            raise SinkError(message)
        return cls(**{name: position[name] for name in kinds})


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to write; *continue_from* is the first batch of another query, None refuses another query."""

    query: str
    number: int
    slots: int
    continue_from: int | None = None


def rows_to_skip(found: SlotPosition | None, batch: Batch, where: str) -> int:
    """Return how many rows of a batch a slot has committed already; -1 for all of them, without a look at the rows."""
    if found is None:
        return -1 if batch.continue_from is not None and batch.number < batch.continue_from else 0
    if found.slots != batch.slots:
        message = (
            f"number of slots of {where} changed: got {batch.slots}, it has {found.slots}; a repeated batch would be "
            f"cut otherwise: set slots={found.slots}, or choose another sink_id"
        )
        raise SinkError(message)
    if found.query != batch.query:
        return _of_another_query(found, batch, where)
    if found.batch > batch.number:
        message = (
            f"{where} is ahead of the query: got batch {batch.number}, it has committed batch {found.batch}; the "
            "checkpoint is an older copy: restore the newest one, or choose another sink_id for a query that begins "
            "anew"
        )
        raise SinkError(message)
    return found.rows if found.batch == batch.number else 0


def _of_another_query(found: SlotPosition, batch: Batch, where: str) -> int:
    is_run = batch.query.startswith("run:")
    if is_run and found.query.startswith("run:"):
        return 0
    if batch.continue_from is None or is_run:
        message = (
            f"{where} was written by another query: got query {batch.query}, batch {batch.number}; it has query "
            f"{found.query}, batch {found.batch}; with a new checkpoint batches begin at 0 again: give "
            "continue_from_batch the first batch whose rows the queue does not have, or choose "
            "another sink_id"
        )
        raise SinkError(message)
    return -1 if batch.number < batch.continue_from else 0


def check_repeated(found: SlotPosition, digest: str, rows: int, where: str, *, is_end: bool) -> None:
    """
    Refuse a repeated batch that has other rows than those that are committed.

    *digest* is that of the first `found.rows` rows of the repeated batch, or of all *rows* where it has fewer; *is_end*
    says that it has no more.
    """
    if rows == found.rows and digest == found.digest and is_end == found.is_whole:
        return
    had = f"{found.rows} rows are committed" + (", all that there were" if found.is_whole else " and more were to come")
    got = f"{rows} rows" if is_end else f"{rows} rows and more"
    message = (
        f"batch {found.batch} came again with other rows in {where}: {had}; got {got}; make the query deterministic "
        "(no rand(), no current time, no source that changes), or write its rows to a table first and send them "
        "from there"
    )
    raise SinkError(message)
