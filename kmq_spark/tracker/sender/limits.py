"""Limits of the sender's transactions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """
    Limits of one sender.

    Attributes:
        timeout: Bound on each call to the broker, seconds.
        max_transaction_messages: Most messages in one transaction.
        max_transaction_bytes: A transaction gets no more messages once their payloads have this many bytes.
        commit_interval_ms: Time between two offset commits while nothing is sent, milliseconds.
        transaction_timeout_ms: Kafka's `transaction.timeout.ms`: the broker aborts a transaction without activity after
            this time. Until then `read_committed` consumers of its partitions read nothing that was written after it.
    """

    timeout: float = 15
    max_transaction_messages: int = 30_000
    max_transaction_bytes: int = 16 * 1024 * 1024
    commit_interval_ms: int = 5_000
    transaction_timeout_ms: int = 10_000
