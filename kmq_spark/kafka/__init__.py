"""
All code that uses a Kafka client: topics, producers, consumers, redelivery, TICKs.

Rule 1: This is the only package that imports confluent_kafka. It never imports pyspark.
Rule 2: A process creates its clients itself, after any fork. Clients are never pickled.
"""

from __future__ import annotations
