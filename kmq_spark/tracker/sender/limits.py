"""Limits of the sender's transactions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """
    Limits of one sender.

    Attributes:
        max_transaction_bytes: A transaction gets no more messages once their payloads have this many bytes.
        commit_interval: Time between two offset commits while nothing is sent, seconds: also the heartbeat by which
            monitoring distinguishes an idle tracker from a dead one.
        transaction_timeout: Kafka's `transaction.timeout.ms`, seconds: the broker aborts a transaction without activity
            after this time. Until then `read_committed` consumers read nothing behind it.
    """

    timeout: float = 15
    max_transaction_messages: int = 30_000
    max_transaction_bytes: int = 16 * 1024 * 1024
    commit_interval: float = 5.0
    transaction_timeout: float = 10.0
