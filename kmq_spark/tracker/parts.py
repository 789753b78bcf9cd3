"""
Build the parts of a tracker from the settings: its sender, its ticker, what pauses between its batches.

The streaming tracker and `track_once` share them.

Rule 1: This module only builds objects; no function here connects to a broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kmq_spark.config import plain
from kmq_spark.kafka.queue_rules import RulesReader
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


def sender_of(settings: Settings, layout: QueueLayout) -> RedeliverySender:
    """Return the sender of a queue, not open yet."""
    kafka, tracker, extra = settings.kafka, settings.tracker, plain(settings.kafka.extra)
    limits = SenderLimits(
        timeout=kafka.timeout,
        max_transaction_messages=tracker.max_transaction_messages,
        commit_interval=tracker.commit_interval,
    )
    reading = reader_config(kafka.bootstrap_servers, layout.topics.tracker_group, new_client_id("rules"), extra)
    return RedeliverySender(
        layout,
        bootstrap_servers=kafka.bootstrap_servers,
        extra=extra,
        limits=limits,
        rules_reader=RulesReader(layout.topics, reading, kafka.timeout),
    )


def ticker_of(settings: Settings, layout: QueueLayout) -> Ticker:
    """Return the ticker of a queue, not started yet."""
    kafka = settings.kafka
    return Ticker(
        marker_producer_config(kafka.bootstrap_servers, extra=plain(kafka.extra), delivery_timeout_ms=5_000),
        layout.topics.markers_topic,
        layout.partition_count,
    )


def pauser_of(settings: Settings, topics: QueueTopics, ticker: Ticker) -> Pauser:
    """Return what pauses between the batches of a queue's tracker, not connected yet."""
    kafka = settings.kafka
    reading = reader_config(kafka.bootstrap_servers, topics.tracker_group, new_client_id("watch"), plain(kafka.extra))
    return Pauser(ticker, MarkerWatch(reading, topics.markers_topic))
