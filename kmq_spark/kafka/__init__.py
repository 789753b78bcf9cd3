"""
Everything that talks to Kafka: topics, producer, consumer, redelivery, clock.

Rule 1: the only importer of confluent_kafka; never imports pyspark.
Rule 2: clients are made in the process that uses them, after any fork, and are never pickled.
"""

from __future__ import annotations
