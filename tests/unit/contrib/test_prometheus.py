"""Metrics of handlers."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest

from kmq_spark import Message
from kmq_spark.contrib.prometheus import measured
from kmq_spark.testing import InMemoryQueue


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_calls_of_a_handler_are_counted_with_what_they_raise_and_hold() -> None:
    queue = InMemoryQueue("measured", rules={"backoff": "none"})
    for number in range(5):
        queue.producer().send(str(number))
    held: list[float] = []

    def handle(message: Message) -> None:
        held.append(value("kmq_messages_held", queue="measured"))
        if message.value == b"3" and message.delivery_count == 1:
            raise KeyError("no such order")

    assert queue.work(measured(handle)).acked == 5
    assert value("kmq_handler_duration_seconds_count", queue="measured") == 6
    assert value("kmq_handler_failures_total", queue="measured", error="KeyError") == 1
    assert max(held) >= 1
    assert value("kmq_messages_held", queue="measured") == 0
    assert "kmq_handler_duration_seconds_bucket" in generate_latest(REGISTRY).decode()
