"""The bookkeeping of a batch by itself: no broker, leases of an hour."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Message as KafkaMessage
from hypothesis import given
from hypothesis import strategies as st

from kmq_spark.consumer.batch import Batch, Part
from kmq_spark.consumer.leases import Lease, LeaseTable, Outbox, Verb
from kmq_spark.errors import ConfigError, LeaseLostError, UsageError
from kmq_spark.kafka.clock import now_s

if TYPE_CHECKING:
    from collections.abc import Iterator

HOUR_S = 3_600.0


def batch_of(*sizes: int, begin: int = 0, interleaved: bool = False) -> Batch:
    """Return a batch with that many messages of queue partition 0, 1 …; with *interleaved* in turns."""
    leases = [
        Lease(
            outbox=Outbox(partition),
            delivery_count=partition + 1,
            held=set(),
            is_whole=True,
            renewed_at=now_s(),
            ends_at=now_s() + HOUR_S,
            limit_at=now_s() + HOUR_S,
            offsets=list(range(begin, begin + size)),
            sizes=[1] * size,
        )
        for partition, size in enumerate(sizes)
    ]
    pairs = [(lease, offset) for lease in leases for offset in lease.offsets]
    if interleaved:
        pairs.sort(key=lambda pair: (pair[1], pair[0].queue_partition))
    records = [
        KafkaMessage(
            "orders", lease.queue_partition, offset, b"k%d" % number, b"v%d" % number,
            [("kmq-logical-queue", b"emails"), ("trace", b"%d" % number)], None, (2, 1_000 + number),
        )
        for number, (lease, offset) in enumerate(pairs)
    ]  # fmt: skip
    parts = [Part(lease, number, number + 1) for number, (lease, _) in enumerate(pairs)]
    if not interleaved:
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        parts = [Part(lease, end - size, end) for lease, end, size in zip(leases, ends, sizes, strict=True)]
    return Batch(records, [offset for _, offset in pairs], parts)


def leases_of(batch: Batch) -> list[Lease]:
    """Return the leases of a batch, each once."""
    return list({id(part.lease): part.lease for part in batch._parts}.values())


def acked_of(lease: Lease) -> list[int]:
    """Return the offsets that an END would be written for."""
    together = [offset for first, count in lease.outbox.acked_ranges for offset in range(first, first + count)]
    return [*lease.outbox.acked, *together]


def written(batch: Batch) -> dict[tuple[int, int], list[str]]:
    """Return what the outboxes have, by partition and offset: all verbs that a marker would be written for."""
    found: dict[tuple[int, int], list[str]] = {}
    for lease in leases_of(batch):
        for offset in acked_of(lease):
            found.setdefault((lease.queue_partition, offset), []).append("ack")
        for settled in lease.outbox.others:
            found.setdefault((lease.queue_partition, settled.message_offset), []).append(settled.verb.value)
    return found


def test_batch_is_a_sequence_whose_messages_are_made_once() -> None:
    batch = batch_of(3, 2)
    assert len(batch) == 5
    assert batch.values() == [b"v0", b"v1", b"v2", b"v3", b"v4"]
    assert batch.keys() == [b"k0", b"k1", b"k2", b"k3", b"k4"]
    assert batch._made == {}
    assert batch[3] is batch[3] is batch[-2] is list(batch)[3]
    assert [message.value for message in batch[1:4]] == [b"v1", b"v2", b"v3"]
    assert (batch[3].id.queue_partition, batch[3].id.message_offset, batch[3].delivery_count) == (1, 0, 2)
    assert not Batch()
    with pytest.raises(IndexError):
        batch[5]


def test_whole_ack_makes_no_message_and_writes_each_offset_once() -> None:
    batch = batch_of(500, 20)
    batch.ack()
    assert batch._made == {}
    first, second = leases_of(batch)
    assert (acked_of(first), acked_of(second)) == (list(range(500)), list(range(20)))
    assert first.outbox.acked_ranges == [(0, 500)]
    batch.ack()
    assert batch[7].settled_by == "ack"
    assert set(map(tuple, written(batch).values())) == {("ack",)}


def test_ack_of_the_rest_leaves_what_is_settled() -> None:
    batch = batch_of(6)
    batch.reject({0: "bad"})
    batch.fail({1: ValueError("no such order")}, delay=2)
    batch.release([2], delay=3)
    batch.ack([3])
    batch[4].ack()
    batch.ack()
    (lease,) = leases_of(batch)
    reject, fail, release = lease.outbox.others
    assert (reject.verb, reject.message_offset, reject.reason) == (Verb.REJECT, 0, "bad")
    assert (fail.message_offset, fail.delay_ms, fail.reason) == (1, 2_000, "ValueError: no such order")
    assert fail.has_failed
    assert (release.message_offset, release.delay_ms, release.has_failed) == (2, 3_000, False)
    assert sorted(acked_of(lease)) == [3, 4, 5]
    assert [message.settled_by for message in batch] == ["reject", "release", "release", "ack", "ack", "ack"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda batch: batch.ack([3]), "index is out of bounds: got 3, the batch has 3 messages; count from 0"),
        (lambda batch: batch.release([0], delay=-1), "delay is out of bounds"),
        (lambda batch: batch.fail({0: "a", 3: "b"}), "index is out of bounds: got 3"),
    ],
)
def test_bad_input_is_refused_and_settles_nothing(call: Any, expected: str) -> None:  # noqa: ANN401  # functions of a batch
    batch = batch_of(3)
    with pytest.raises(ConfigError, match=expected):
        call(batch)
    assert written(batch) == {}


def test_other_verb_is_refused_and_settles_nothing() -> None:
    batch = batch_of(3)
    batch.reject({1: "bad"})
    with pytest.raises(UsageError, match="message 1 of the batch is already settled: got ack after reject"):
        batch.ack([0, 1, 2])
    assert written(batch) == {(0, 1): ["reject"]}
    batch.reject({1: "the same verb is allowed"})
    assert written(batch) == {(0, 1): ["reject"]}


@pytest.mark.parametrize("is_whole", [True, False])
def test_lost_lease_is_told_once_for_the_batch_and_its_end_is_written(*, is_whole: bool) -> None:
    batch = batch_of(3, 2)
    first, _ = leases_of(batch)
    first.ends_at = now_s() - 1
    with pytest.raises(LeaseLostError, match="leases of 3 of 5 messages of the batch are lost: the lease ran out"):
        batch.ack(None if is_whole else range(5))
    assert set(map(tuple, written(batch).values())) == {("ack",)}
    assert len(written(batch)) == 5


def test_arrow_table_has_a_row_for_each_message() -> None:
    pytest.importorskip("pyarrow")
    table = batch_of(2, 1).to_arrow()
    assert table.column_names == [
        "key", "value", "headers", "partition", "offset", "appended_at", "delivery_count",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert [row["value"] for row in rows] == [b"v0", b"v1", b"v2"]
    assert [(row["partition"], row["offset"], row["delivery_count"]) for row in rows] == [
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 2),
    ]
    assert rows[2]["headers"] == [{"name": "trace", "value": b"2"}]
    assert rows[1]["appended_at"].timestamp() == 1.001
    assert Batch().to_arrow().num_rows == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ack", "release", "fail", "reject", "message.ack", "message.release", "extend", "look"]),
        st.lists(st.integers(0, 8), max_size=4),
    ),
    max_size=8,
)
VERB_OF = {
    "ack": "ack", "release": "release", "fail": "release", "reject": "reject", "message.ack": "ack",
    "message.release": "release",
}  # fmt: skip


def act(batch: Batch, step: str, indices: list[int]) -> None:
    """Call what a step names."""
    if step in {"ack", "release"}:
        getattr(batch, step)(indices)
    elif step in {"fail", "reject"}:
        getattr(batch, step)(dict.fromkeys(indices, "no"))
    else:
        for index in indices:
            {"message.ack": batch[index].ack, "message.release": batch[index].release}[step]()


@given(
    steps=STEPS,
    is_interleaved=st.booleans(),
    rest=st.sampled_from(["ack", "release", "nothing"]),
    cut=st.integers(0, 9),
)
def test_batch_settles_what_a_dictionary_of_verbs_settles(
    *, steps: list[tuple[str, list[int]]], is_interleaved: bool, rest: str, cut: int
) -> None:
    whole = batch_of(5, 4, interleaved=is_interleaved)
    batch, other = whole._split(cut)
    model: dict[int, str] = {}
    for step, wanted in steps:
        indices = list(dict.fromkeys(index for index in wanted if index < len(batch)))
        if step == "look":
            assert [batch[index].settled_by for index in indices] == [model.get(index, "") for index in indices]
        elif step == "extend":
            for index in indices:
                if index not in model:
                    batch[index].extend(100)
        elif not step.startswith("message") and any(model.get(i, VERB_OF[step]) != VERB_OF[step] for i in indices):
            with pytest.raises(UsageError, match="is already settled"):
                act(batch, step, indices)
        else:
            indices = [index for index in indices if model.get(index, VERB_OF[step]) == VERB_OF[step]]
            act(batch, step, indices)
            model |= dict.fromkeys(indices, VERB_OF[step])
    if rest != "nothing":
        getattr(batch, rest)()
        model = {index: model.get(index, rest) for index in range(len(batch))}
    places = [(batch._lease(index).queue_partition, batch._offsets[index]) for index in range(len(batch))]
    assert written(whole) == {places[index]: [verb] for index, verb in model.items()}
    verbs = [model.get(index) for index in range(len(batch))]
    assert batch._verb_counts() == {
        (Verb(verb) if verb else None): verbs.count(verb) for verb in {*verbs}
    }  # fmt: skip
    assert [message.settled_by for message in batch] == [verb or "" for verb in verbs]
    assert not any(message.settled_by for message in other)
    assert batch._release_uncounted() == verbs.count(None)


def test_two_threads_settle_each_message_once() -> None:
    for _ in range(20):
        batch = batch_of(2_000)
        threads = [
            threading.Thread(target=batch.ack),
            threading.Thread(target=lambda each=batch: [message.ack() for message in each._to_messages()]),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(acked_of(leases_of(batch)[0])) == list(range(2_000))


def test_settling_a_whole_lease_in_two_threads_settles_each_message_once() -> None:
    for _ in range(200):
        batch = batch_of(100)
        (lease,) = leases_of(batch)
        taken: list[list[int]] = []
        calls = (batch._release_uncounted, lease.split, lambda into=taken, lease=lease: into.append(lease.take_held()))
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        released = [settled.message_offset for settled in lease.outbox.others]
        assert sorted([*released, *taken[0]]) == list(range(100))
        assert lease.held_count == 0


def test_lease_holds_its_messages_while_it_is_split() -> None:
    """A lease that seemed to hold nothing for a moment would be removed from the table, and never be renewed."""
    table, stop = LeaseTable(), threading.Event()
    seen: set[int] = set()

    def count() -> None:
        while not stop.is_set():
            seen.add(table.held_count(now_s()))

    thread = threading.Thread(target=count)
    batches = [batch_of(2_000) for _ in range(20)]
    table.open([lease for batch in batches for lease in leases_of(batch)])
    thread.start()
    for batch in batches:
        assert len(batch[0:1]) == 1
    stop.set()
    thread.join()
    assert seen <= {40_000}


class SettledMeanwhile(list[int]):
    """The offsets of a lease; a signal handler settles all of them while they are read for the first time."""

    lease: Lease | None = None
    taken: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[int]:
        """Read the offsets."""
        lease, self.lease = self.lease, None
        if lease is not None:
            self.taken = tuple(lease.take_held())
        return super().__iter__()


def test_signal_handler_that_settles_a_lease_during_its_split_does_not_wait_and_settles_once() -> None:
    batch = batch_of(5)
    (lease,) = leases_of(batch)
    lease.offsets = offsets = SettledMeanwhile(lease.offsets)
    offsets.lease = lease
    lease.split()
    assert offsets.taken == (0, 1, 2, 3, 4)
    assert (lease.held_count, lease.held_offsets()) == (0, [])
