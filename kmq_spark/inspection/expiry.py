"""
Check whether a consumer group that was unused for a while would read acknowledged messages again.

Rule 1: Messages are kept longer than the group's offsets only if the queue's retention is longer than the brokers'
offset retention. Otherwise every message that was acknowledged before the last member left is removed before the
offsets expire. Therefore comparing the two settings is enough, and nothing is stored elsewhere.
Rule 2: A tracker restores the offsets (`tracker/consumer_positions.py`) until its own copy of them has expired too.

Source: Kafka's documentation of `offsets.retention.minutes`; KIP-211.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.inspection.spans import span

if TYPE_CHECKING:
    from kmq_spark.inspection.facts import QueueFacts


def expiry_finding(facts: QueueFacts) -> tuple[str, str] | None:
    """Return the problem and its repair; None if there is no problem, or this client may not read a setting."""
    kept = facts.queue_topic.settings.get("retention.ms")
    offsets_kept_ms = facts.cluster.offsets_retention_ms
    if kept is None or offsets_kept_ms is None or 0 <= int(kept) <= offsets_kept_ms:
        return None
    tracker = facts.tracker
    is_recent = tracker.heartbeat_at_ms is not None and facts.now_ms - tracker.heartbeat_at_ms < offsets_kept_ms
    if tracker.keeps_offsets and is_recent:
        return None
    kept_for = "without limit" if int(kept) < 0 else span(int(kept))
    what = (
        f"the brokers delete the offsets of {facts.consumers.name} after {span(offsets_kept_ms)} without consumers, "
        f"and {facts.queue_topic.name} keeps messages {kept_for}: consumers that return later read acknowledged "
        "messages again"
    )
    if tracker.keeps_offsets is False:
        group = f"consumer group {facts.consumers.name}"
        return f"{what}; the tracker may not restore them", f"grant the tracker Read and Describe on {group}: kmq acls"
    minutes = "offsets.retention.minutes of the brokers"
    repair = f"keep the tracker running, which restores them, or raise {minutes} to the queue's retention.ms or more"
    return what, repair
