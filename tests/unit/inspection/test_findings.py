"""What an inspector reads from a queue's topics, and the doctor's findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kmq_spark.core.events import LoggedMarker
from kmq_spark.core.markers import Marker, MarkerType, MessageId, OffsetRange, Outcome
from kmq_spark.inspection.cluster import queues_of
from kmq_spark.inspection.facts import (
    Backlog,
    ClusterFacts,
    DoctorFacts,
    FleetFacts,
    GroupFacts,
    PartitionView,
    ProducersFacts,
    QueueView,
    TopicFacts,
    TrackerFacts,
)
from kmq_spark.inspection.findings import Finding, Level, examine, is_unhealthy
from kmq_spark.inspection.markers_fold import MarkersFold
from kmq_spark.inspection.spans import span
from kmq_spark.inspection.story import (
    Event,
    PlacedMarker,
    covers,
    last_outcome,
    marker_events,
    merge_renewals,
    sort_events,
)

NOW_MS = 1_000_000
RANGE = (OffsetRange(10, 3),)


def start(offset: int, at_ms: int, ranges: tuple[OffsetRange, ...] = RANGE, **options: Any) -> LoggedMarker:
    """Return a START with a lease of 30 s."""
    marker = Marker(MarkerType.START, 0, ranges, 30_000, consumer_id="worker-1", **options)
    return LoggedMarker(offset, at_ms, marker)


def end(offset: int, at_ms: int, first: int, count: int = 1, outcome: Outcome = Outcome.ACKED) -> LoggedMarker:
    """Return an END."""
    marker = Marker(MarkerType.END, 0, (OffsetRange(first, count),), outcome=outcome, consumer_id="tracker-1")
    return LoggedMarker(offset, at_ms, marker)


def renewal(offset: int, at_ms: int) -> LoggedMarker:
    """Return a KEEPALIVE of all three."""
    return LoggedMarker(offset, at_ms, Marker(MarkerType.KEEPALIVE, 0, RANGE, 30_000))


def tick(offset: int, at_ms: int) -> LoggedMarker:
    """Return a TICK."""
    return LoggedMarker(offset, at_ms, Marker(MarkerType.TICK))


def seen(ago_ms: int, *, is_stopped: bool = False) -> TrackerFacts:
    """Return a tracker that has read everything and committed so long ago."""
    positions = {0: 90, 1: 90}
    return TrackerFacts(
        positions,
        positions,
        dict.fromkeys(positions, "t-1"),
        heartbeat_at_ms=NOW_MS - ago_ms,
        is_stopped=is_stopped,
    )


def behind(count: int) -> TrackerFacts:
    """Return a tracker that has not read so many markers."""
    unread = Backlog({0: count}, oldest_at_ms=NOW_MS - 45_000)
    return TrackerFacts({0: 80, 1: 90}, {}, {0: "t-1"}, unread)


def fold_of(*markers: LoggedMarker) -> MarkersFold:
    """Return a fold of these."""
    fold = MarkersFold()
    fold.add(markers)
    return fold


def view_of(*markers: LoggedMarker) -> dict[int, PartitionView]:
    """Return the view of partition 0 with these."""
    return {0: fold_of(*markers).view(NOW_MS)}


def test_messages_in_flight_are_reported_with_who_holds_them_since_when() -> None:
    fold = fold_of(start(5, 1_000), end(6, 2_000, first=11))
    found = [
        (each.message_offset, each.started_at_ms, each.deadline_at_ms, each.consumer_id) for each in fold.messages()
    ]
    assert found == [
        (10, 1_000, 31_000, "worker-1"),
        (12, 1_000, 31_000, "worker-1"),
    ]  # fmt: skip
    view = fold.view(2_000)
    assert (view.acked_at_ms, view.newest_at_ms, view.holders) == (2_000, 2_000, {"worker-1": (2, 1_000)})
    assert fold.view(40_000).holders == {}


def test_rejected_message_has_no_deadline_and_hides_no_holder() -> None:
    """It shares a START with others that are held, then with one that is overdue."""
    rejected = end(6, 2_000, first=11, outcome=Outcome.REJECTED)
    view = fold_of(start(5, 1_000), rejected).view(2_000)
    assert (view.in_flight, view.holders) == (3, {"worker-1": (2, 1_000)})
    fold = fold_of(start(5, 1_000), rejected, end(7, 3_000, first=12))
    found = examine(facts_of(partitions={0: fold.view(NOW_MS)}))
    assert "1 of 2 messages is past its deadline" in " ".join(each.what for each in found)


def test_who_looks_decides_nothing() -> None:
    """A message past its deadline stays in flight until the tracker's END is read."""
    fold = fold_of(start(5, 1_000), tick(6, 90_000))
    assert fold.view(90_000).overdue(90_000) == 3
    fold.add([end(7, 91_000, 10, 3, Outcome.REDELIVERED)])
    view = fold.view(99_000)
    assert (view.overdue(99_000), view.counted["redelivered"]) == (0, 3)


def test_deadlines_are_reported_on_the_brokers_clock_after_it_was_set_back() -> None:
    """Who looks compares them with a clock that is not an hour ahead."""
    fold = fold_of(tick(0, 3_600_000), start(1, 1_000))
    assert {held.deadline_at_ms for held in fold.messages()} == {31_000}
    view = fold.view(31_000)
    assert (view.overdue(31_000), view.overdue(31_001)) == (0, 3)


def test_looking_again_folds_only_what_is_new() -> None:
    fold = fold_of(start(5, 1_000))
    fold.add([start(5, 1_000), LoggedMarker(6, 1_500, None)])
    view = fold.view(NOW_MS)
    assert (view.in_flight, view.unreadable, view.unreadable_at) == (3, 1, (6,))


def test_figures_count_what_is_deferred_apart() -> None:
    deferral = start(6, 1_000, (OffsetRange(20, 2),), never_handed_out=True, due_at_ms=9_000_000)
    ready = Backlog({0: 7}, is_exact=True, oldest_at_ms=900_000)
    view = facts_of(partitions=view_of(start(5, 400_000), deferral), ready=ready).view
    assert (view.in_flight, view.deferred, view.overdue(), view.ready.count) == (3, 2, 3, 7)
    assert view.figures()["oldest_in_flight_age_ms"] == 600_000  # not the deferral's
    assert view.figures()["oldest_ready_age_ms"] == 100_000


FIT = {"message.timestamp.type": "LogAppendTime", "cleanup.policy": "delete", "retention.ms": "604800000"}


def facts_of(**changes: Any) -> DoctorFacts:
    """Return the facts of a queue that is well, with changes of the view and of what only the doctor looks at."""
    view = QueueView(
        queue="orders",
        now_ms=NOW_MS,
        queue_topic=TopicFacts("orders", 2, FIT, 1, first={0: 0, 1: 0}, end={0: 50, 1: 50}),
        markers_topic=TopicFacts("orders.markers", 2, FIT, 1, first={0: 0, 1: 0}, end={0: 90, 1: 90}),
        dead_letter_topic=TopicFacts("orders.dlq", 2, FIT, 1, first={0: 0, 1: 0}, end={0: 0, 1: 0}),
        consumers=GroupFacts("kmq.orders", "STABLE", {"worker-1": frozenset({0, 1})}, {0: 50, 1: 50}),
        tracker=TrackerFacts({0: 90, 1: 90}, {0: 90, 1: 90}, {0: "t-1", 1: "t-1"}, heartbeat_at_ms=NOW_MS),
    )
    mine = {name: changes.pop(name) for name in list(changes) if hasattr(view, name)}
    return replace(DoctorFacts(view=replace(view, **mine), cluster=ClusterFacts("host:9092", 1)), **changes)


def bad(facts: DoctorFacts) -> list[Finding]:
    """Return what is not well."""
    return [finding for finding in examine(facts) if finding.level is not Level.OK]


def test_a_queue_that_is_well_has_no_findings() -> None:
    assert bad(facts_of()) == []
    assert not is_unhealthy(examine(facts_of()))


def test_doctor_counts_deferred_messages_apart_as_top_does() -> None:
    """No consumer holds a message that waits for its time."""
    fold = fold_of(start(5, 1_000), start(6, 1_000, (OffsetRange(20, 1),), never_handed_out=True))
    facts = facts_of(now_ms=2_000, partitions={0: fold.view(2_000)})
    (found,) = [finding for finding in examine(facts) if finding.check == "in flight"]
    assert found.what == "3 messages and 1 deferred, none past its deadline"


def topic(name: str, **changes: Any) -> DoctorFacts:
    """Return facts in which one topic has changed."""
    return facts_of(**{name: replace(getattr(facts_of().view, name), **changes)})


SICK: dict[str, tuple[DoctorFacts, Level, str, str]] = {
    "topic missing": (
        topic("dead_letter_topic", partition_count=0),
        Level.UNHEALTHY, "topic 'orders.dlq' does not exist", "kmq queue create orders",
    ),
    "one broker is enough for a write": (
        topic("markers_topic", replicas=3, settings={**FIT, "min.insync.replicas": "1"}),
        Level.UNHEALTHY, "'orders.markers' has min.insync.replicas=1", "--add-config min.insync.replicas=2",
    ),
    "unclean leader": (
        topic("queue_topic", replicas=2, settings={**FIT, "unclean.leader.election.enable": "true"}),
        Level.UNHEALTHY, "'orders' has unclean.leader.election.enable=true", "unclean.leader.election.enable=false",
    ),
    "partitions uneven": (
        topic("markers_topic", partition_count=1),
        Level.UNHEALTHY, "'orders.markers' has 1 partitions, 'orders' has 2", "--topic orders.markers --partitions 2",
    ),
    "wrong clock": (
        topic("markers_topic", settings={**FIT, "message.timestamp.type": "CreateTime"}),
        Level.UNHEALTHY, "'orders.markers' has message.timestamp.type=CreateTime", "kafka-configs.sh --alter",
    ),
    "compacted": (
        topic("queue_topic", settings={**FIT, "cleanup.policy": "compact"}),
        Level.UNHEALTHY, "cleanup.policy=compact", "cleanup.policy=delete",
    ),
    "no leader": (
        topic("queue_topic", leaderless=(1,)), Level.UNHEALTHY, "no leader: partitions 1", "start",
    ),
    "out of sync": (
        topic("queue_topic", under_replicated=(0,)), Level.WARNING, "out-of-sync replicas", "brokers",
    ),
    "one replica": (facts_of(cluster=ClusterFacts("a,b", 3)), Level.WARNING, "has one replica", "raise its"),
    "limited in bytes": (
        topic("queue_topic", settings={**FIT, "retention.bytes": "2000000"}),
        Level.WARNING, "messages that nobody has read may be deleted", "retention.bytes=-1",
    ),
    # 5 deliveries x 30 s x 3 = 450 s
    "retention tight": (
        topic("markers_topic", settings={**FIT, "retention.ms": "200000"}),
        Level.WARNING, "kept for 3 min 20 s; 5 leases of 30 s", "retention.ms=450000",
    ),
    "no tracker ever": (
        facts_of(tracker=TrackerFacts()),
        Level.UNHEALTHY, "no tracker has ever committed", "kmq tracker run orders",
    ),
    "tracker down": (
        facts_of(tracker=behind(10)),
        Level.UNHEALTHY, "10 markers not read, the oldest for 45 s", "kmq tracker run orders",
    ),
    "tracker killed": (
        facts_of(tracker=seen(23_000), partitions=view_of(start(5, NOW_MS - 31_000))),
        Level.UNHEALTHY, "no tracker for 23 s, 3 overdue",
        "if one runs, its log says why it fails; else: kmq tracker run orders",
    ),
    "tracker that starts its query again and again": (
        facts_of(tracker=replace(seen(23_000), trouble="restarting, 6 of 20: No space left on device")),
        Level.UNHEALTHY, "the tracker is restarting, 6 of 20: No space left on device; last heartbeat 23 s ago, 0 over",
        "correct the cause",
    ),
    "tracker that gave up": (
        facts_of(tracker=replace(seen(61_000), trouble="restarting, 20 of 20: No space left on device")),
        Level.UNHEALTHY, "no tracker for 1 min 1 s, 0 overdue; its last words: restarting, 20 of 20: No space left",
        "kmq tracker run orders",
    ),
    "tracker stopped": (
        facts_of(tracker=seen(300_000, is_stopped=True)),
        Level.WARNING, "the tracker was stopped 5 min ago, 0 overdue", "kmq tracker run orders",
    ),
    "no snapshots": (
        facts_of(tracker=replace(seen(1_000), snapshot_lag=400)),
        Level.UNHEALTHY, "no snapshot of the tracker's state for 400 batches", "file system",
    ),
    "no TICK": (
        facts_of(tracker=seen(1_000), partitions=view_of(tick(4, NOW_MS - 90_000), start(5, NOW_MS - 90_000))),
        Level.UNHEALTHY, "no TICK for 1 min although messages are due: partitions 0", "cannot write TICKs",
    ),
    "markers removed": (
        topic("markers_topic", first={0: 95, 1: 0}, end={0: 99, 1: 90}),
        Level.UNHEALTHY, "retention removed markers 90 to 94 of orders.markers[0]", "raise retention.ms",
    ),
    "topic deleted and created again": (
        topic("markers_topic", end={0: 3, 1: 90}),
        Level.UNHEALTHY, "orders.markers[0] ends at 3, the tracker has committed 90", "kmq tracker run orders",
    ),
    "two trackers": (
        facts_of(tracker=TrackerFacts({0: 90, 1: 90}, {}, {0: "t-1", 1: "t-2"})),
        Level.WARNING, "2 trackers made the latest commits: t-1, t-2", "run one tracker per queue",
    ),
    "no consumer": (
        facts_of(consumers=GroupFacts("kmq.orders", "EMPTY", {}, {0: 50, 1: 40}), ready=Backlog({0: 10})),
        Level.UNHEALTHY, "10 messages ready and no consumer", "start workers",
    ),
    "past the deadline": (
        facts_of(partitions=view_of(start(5, NOW_MS - 90_000))),
        Level.UNHEALTHY, "3 of 3 messages are past their deadline, the oldest by 1 min", "kmq tracker run orders",
    ),
    "workers stuck": (
        facts_of(
            partitions=view_of(start(5, NOW_MS - 300_000), renewal(6, NOW_MS - 5_000)),
            ready=Backlog({0: 40}),
        ),
        Level.UNHEALTHY, "no message was settled for 5 min while 40 are ready: worker-1 holds 3 for 5 min", "restart",
    ),
    "foreign records": (
        facts_of(partitions=view_of(LoggedMarker(7, NOW_MS, None))),
        Level.WARNING, "1 record of orders.markers is not a marker: [0]@7", "revoke its right to Write",
    ),
    "dead letters": (
        facts_of(dead_letters=Backlog({0: 4}), new_dead_letters=2),
        Level.WARNING, "4 in orders.dlq, growing: 2 in the last hour", "kmq dlq list orders",
    ),
    "transaction hangs": (
        facts_of(blocked={"orders": (0, 3), "orders.markers": ()}),
        Level.UNHEALTHY, "a transaction has been open in orders for more than 1 min 30 s: partitions 0, 3;",
        "find-hanging",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SICK)
def test_each_trouble_is_found_with_its_repair(name: str) -> None:
    facts, level, what, repair = SICK[name]
    finding = next(finding for finding in bad(facts) if what in finding.what)
    assert (finding.level, repair in finding.repair) == (level, True)
    assert is_unhealthy(examine(facts)) == (level is Level.UNHEALTHY)


def test_long_work_with_acks_is_no_trouble() -> None:
    """A consumer that holds one message for long and settles others is at work."""
    work = fold_of(start(5, NOW_MS - 300_000), end(6, NOW_MS - 5_000, 11))
    work.add([LoggedMarker(7, NOW_MS - 5_000, Marker(MarkerType.KEEPALIVE, 0, (OffsetRange(10, 1),), 30_000))])
    found = bad(facts_of(partitions={0: work.view(NOW_MS)}, ready=Backlog({0: 40})))
    assert {each.check for each in found} == {"in flight", "ticks"}  # 12 is overdue


POSITIONS = TopicFacts("orders.producers", 1, {"cleanup.policy": "compact"}, 1)


@pytest.mark.parametrize(
    ("producers", "level", "what", "repair"),
    [
        (
            ProducersFacts(replace(POSITIONS, settings={"cleanup.policy": "compact,delete"})),
            Level.UNHEALTHY, "has cleanup.policy=compact,delete, must be compact", "cleanup.policy=compact",
        ),
        (ProducersFacts(POSITIONS, 2, unreadable=("a",)), Level.UNHEALTHY, "of a cannot be read", "forget orders a"),
        (ProducersFacts(POSITIONS, 1, open_for_ms=2_000), Level.WARNING, "open in orders.producers for at least", ""),
        (ProducersFacts(POSITIONS, 2), Level.OK, "2 producer ids, positions in a compacted topic", ""),
    ],
)  # fmt: skip
def test_finding_about_producers_has_its_repair(
    producers: ProducersFacts, level: Level, what: str, repair: str
) -> None:
    (finding,) = [each for each in examine(facts_of(producers=producers)) if each.check == "producers"]
    assert (finding.level, what in finding.what, repair in finding.repair) == (level, True, True)


@pytest.mark.parametrize(("longest_ms", "count"), [(0, 0), (60_000, 0), (59_999, 1)])
def test_brokers_that_refuse_the_time_out_of_a_sink_are_named(longest_ms: int, count: int) -> None:
    """Also before there is a producer with an id: a sink that cannot start leaves none."""
    none = ProducersFacts(TopicFacts("orders.producers"))
    found = bad(facts_of(producers=none, cluster=ClusterFacts("host:9092", 1, longest_ms)))
    assert len(found) == count
    assert all("transaction.max.timeout.ms=60000" in each.repair for each in found)


def test_queues_are_known_by_their_topics() -> None:
    names = [
        *("orders", "orders.markers", "orders.dlq", "orders.dlq.markers"),
        *(
            "orders.subscription-billing.markers",
            "orders.subscription-billing.dlq",
            "orders.subscription-billing.dlq.markers",
        ),
        *("other", "lonely.markers", "__consumer_offsets"),
    ]
    assert queues_of(names) == ["orders", "orders@billing"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0.0 s"),
        (61_000, "1 min 1 s"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_spans_are_written_in_two_units(ms: int, text: str) -> None:
    assert span(ms) == text


def test_story_of_a_lease_is_listed_line_by_line() -> None:
    message = MessageId(0, 11)
    log = [start(5, 1_000), LoggedMarker(6, 2_000, Marker(MarkerType.KEEPALIVE, 0, RANGE, 30_000, consumer_id="w"))]
    log += [end(7, 9_000, 11, 1, Outcome.REDELIVERED), end(8, 9_500, 99)]
    markers = [
        PlacedMarker(0, each.marker_offset, each.appended_at_ms, each.marker) for each in log if each.marker is not None
    ]
    mine = [each for each in markers if covers(each.marker, message)]
    assert [event.what for event in marker_events("orders.markers", mine)] == [
        "started, delivery 1, lease 30 s", "renewed, lease 30 s", "redelivered",
    ]  # fmt: skip
    ended = last_outcome(mine)
    assert ended is not None
    assert ended.marker.outcome is Outcome.REDELIVERED


def test_late_ack_of_an_older_copy_is_reported_at_its_time() -> None:
    """A copy and the END it was committed with keep their order, whichever leader's clock was ahead."""
    events = [
        Event(100, "q", "sent"),
        Event(500, "m", "fell due"),
        Event(9_000, "m", "late ack"),
        Event(498, "q", "copy 2"),
    ]
    given = [events[0], events[1], events[3], events[2]]
    assert [event.what for event in sort_events(given)] == ["sent", "fell due", "copy 2", "late ack"]
    assert [event.what for event in sort_events(events)][-1] == "late ack"


def test_renewals_of_one_lease_are_one_line() -> None:
    events = [Event(at, "m", "renewed, lease 30 s", "w") for at in (0, 10_000, 20_000)]
    assert [event.what for event in merge_renewals([*events, Event(30_000, "m", "acked", "w")])] == [
        "renewed, lease 30 s, 3 times in 20 s", "acked",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        facts_of(tracker=seen(5_000)),
        # Its clock is ahead of ours.
        facts_of(tracker=seen(-5_000)),
        # The newest TICK lies behind the deadline: the decision is on its way.
        facts_of(tracker=seen(1_000), partitions=view_of(start(5, NOW_MS - 31_000), tick(6, NOW_MS - 900))),
    ],
    ids=["idle", "clock ahead", "ticked"],
)
def test_tracker_that_runs_is_distinguished_from_one_that_is_gone(facts: DoctorFacts) -> None:
    found = [finding for finding in examine(facts) if finding.check in {"tracker", "ticks"}]
    assert [finding.level for finding in found] == [Level.OK]
    assert "the tracker runs, last heartbeat" in found[0].what


COORDINATION = TopicFacts("kmq.coordination", 8, FIT, 1)


def fleet_of(**changes: Any) -> FleetFacts:
    """Return a fleet of two processes, of which one tracks the queue."""
    well = FleetFacts("production", COORDINATION, tracked_by="a", assigned_to="a", processes=2)
    return replace(well, **changes)


@pytest.mark.parametrize(
    ("changes", "level", "what", "repair"),
    [
        ({"is_paused": True}, Level.UNHEALTHY, "is paused", "kmq group pause kmq.fleet.production --end"),
        (
            {"processes": 0, "stale": ("a",)},
            Level.UNHEALTHY,
            "no running process",
            "kmq tracker run --fleet production",
        ),
        ({"tracked_by": "c", "stale": ("c",)}, Level.UNHEALTHY, "no process of fleet production tracks", "logs"),
        ({"processes": 1}, Level.WARNING, "no other one takes over", "start a second one"),
    ],
)
def test_problem_of_a_fleet_is_named_with_its_repair(
    changes: dict[str, Any], level: Level, what: str, repair: str
) -> None:
    (finding,) = bad(facts_of(fleets=(fleet_of(**changes),)))
    assert (finding.check, finding.level) == ("fleet", level)
    assert what in finding.what
    assert repair in finding.repair


def test_queue_of_two_fleets_is_unhealthy() -> None:
    """Their trackers would fence each other."""
    (finding,) = bad(facts_of(fleets=(fleet_of(), fleet_of(name="test"))))
    assert finding.level is Level.UNHEALTHY
    assert "belongs to 2 fleets" in finding.what
    assert finding.repair == "keep one of them: kmq tracker fleet test --remove orders"
