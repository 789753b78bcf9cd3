"""
Build the parts of a tracker from the settings: the rules of a queue, its sender, its ticker.

The streaming tracker and `track_once` share them.

Rule 1: This module only builds objects; no function here connects to a broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.config import plain
from kmq_spark.core.policy import Rules
from kmq_spark.kafka.queue_rules import RulesReader, queue_rules_of
from kmq_spark.kafka.settings import marker_producer_config, new_client_id, reader_config
from kmq_spark.tracker.marker_watch import MarkerWatch
from kmq_spark.tracker.pacing import Pauser
from kmq_spark.tracker.sender.limits import SenderLimits
from kmq_spark.tracker.sender.redelivery import RedeliverySender
from kmq_spark.tracker.ticker import Ticker

if TYPE_CHECKING:
    from kmq_spark.config import Settings
    from kmq_spark.kafka.queue_topics import QueueTopics
    from kmq_spark.kafka.topics import QueueLayout


def rules_of(settings: Settings, queue: str) -> Rules:
    """
    Return the rules of a queue, or of a group given as `queue@subscription`, from the tracker's settings.

    They apply only if the queue has no rules of its own (`kafka/queue_rules.py`).
    """
    local = queue_rules_of(settings.for_queue(queue), version=1)
    return Rules(max_decisions_per_tick=settings.tracker.max_decisions_per_tick).under(local)


def rules_reader_of(settings: Settings, queue: str, layout: QueueLayout) -> RulesReader:
    """Return a reader of the queue's rules, not connected yet."""
    kafka = settings.kafka
    reading = reader_config(
        kafka.bootstrap_servers, layout.topics.tracker_group, new_client_id("rules"), plain(kafka.extra)
    )
    return RulesReader(layout.topics, reading, kafka.timeout, settings.for_queue(queue))


def sender_of(
    settings: Settings, queue: str, layout: QueueLayout, rules_reader: RulesReader | None = None
) -> RedeliverySender:
    """Return the sender of a queue, not open yet. It closes *rules_reader*; None: it gets a reader of its own."""
    kafka, tracker = settings.kafka, settings.tracker
    limits = SenderLimits(
        timeout=kafka.timeout,
        max_transaction_messages=tracker.max_transaction_messages,
        max_transaction_bytes=tracker.max_transaction_bytes,
        commit_interval_ms=tracker.commit_interval_ms,
        transaction_timeout_ms=tracker.transaction_timeout_ms,
    )
    return RedeliverySender(
        layout,
        bootstrap_servers=kafka.bootstrap_servers,
        extra=plain(kafka.extra),
        limits=limits,
        rules=rules_of(settings, queue),
        rules_reader=rules_reader or rules_reader_of(settings, queue, layout),
    )


def ticker_of(settings: Settings, layout: QueueLayout) -> Ticker:
    """Return the ticker of a queue, not started yet."""
    kafka = settings.kafka
    return Ticker(
        marker_producer_config(kafka.bootstrap_servers, extra=plain(kafka.extra), delivery_timeout_ms=5_000),
        layout.topics.markers_topic,
        layout.partition_count,
        settings.tracker.tick_interval_ms,
    )


def pauser_of(settings: Settings, queue: str, topics: QueueTopics, ticker: Ticker) -> Pauser:
    """Return what pauses between the batches of a queue's tracker, not connected yet."""
    kafka = settings.kafka
    reading = reader_config(kafka.bootstrap_servers, topics.tracker_group, new_client_id("watch"), plain(kafka.extra))
    local = queue_rules_of(settings.for_queue(queue), version=1)
    watch = MarkerWatch(reading, topics.markers_topic, dead_letters_expired=local.dead_letters_expired)
    return Pauser(ticker, watch, settings.tracker.rest_ms)
