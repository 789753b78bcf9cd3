"""
One delivery of a message, the three ways to settle it, and how to hold it longer.

Rule 1: settling costs a `set.remove` and a `list.append`; the marker is written by another thread.
Rule 2: a late settlement is told to its caller and written all the same: an END before the tracker's decision wins.
Rule 3: the same verb twice is fine, another verb is an error.

Source: SQS `ReceiveMessage` and Kafka's share consumer for the verbs; see the glossary for why there is no `nack`.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, NoReturn, cast

from kmq_spark.consumer.leases import Settled, Verb
from kmq_spark.core.markers import MAX_TEXT_CHARS, MessageId
from kmq_spark.errors import LeaseLostError, UsageError
from kmq_spark.kafka.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.wire.headers import ORIGIN, PREFIX, expires_at_ms_of, first_sent_ms_of, place_of

if TYPE_CHECKING:
    from datetime import timedelta

    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.leases import Lease


_ACK = Verb.ACK
"""A module's name costs a fifth of what an attribute of an enum does, and `ack` is called a million times a second."""


class Message:
    """
    One delivery of a message, held until it is settled or its lease ends.

    Made by `QueueConsumer`; may be settled from any thread of the process that received it.
    """

    __slots__ = ("_lease", "_offset", "_record", "_verb")

    def __init__(self, record: KafkaMessage, offset: int, lease: Lease) -> None:
        """Keep the record as it is: what nobody looks at is never decoded."""
        self._record = record
        self._offset = offset
        self._lease = lease
        self._verb: Verb | None = None

    def __repr__(self) -> str:
        """Tell identity and state, not the content."""
        state = "held" if self._verb is None else self._verb.value
        return f"<Message {self.id.queue_partition}:{self._offset} delivery {self.delivery_count} {state}>"

    @property
    def value(self) -> bytes | None:
        """The payload, as it was sent."""
        return self._record.value()

    @property
    def key(self) -> bytes | None:
        """The key, as it was sent."""
        return self._record.key()

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers, as they were sent, in order; those of kmq-spark itself are left out."""
        return [(name, value) for name, value in self._all_headers() if not name.startswith(PREFIX)]

    @property
    def id(self) -> MessageId:
        """Where this copy lies: a redelivered message has a new one each time; `origin` stays."""
        return MessageId(self._lease.queue_partition, self._offset)

    @property
    def origin(self) -> MessageId:
        """The place of the first copy: the same for every delivery of a message."""
        return place_of(self._all_headers(), ORIGIN) or self.id

    @property
    def delivery_count(self) -> int:
        """Deliveries so far, this one included: 1 on the first."""
        return self._lease.delivery_count

    @property
    def appended_at_ms(self) -> int:
        """When this copy was appended to the queue topic, epoch milliseconds, broker clock."""
        return self._record.timestamp()[1]

    @property
    def first_sent_at_ms(self) -> int:
        """When the first copy was appended, epoch milliseconds, broker clock."""
        found = first_sent_ms_of(self._all_headers(), self.appended_at_ms)
        return self.appended_at_ms if found is None else found

    @property
    def expires_at_ms(self) -> int | None:
        """When its time to live is over, epoch milliseconds, broker clock; None where it has none."""
        return expires_at_ms_of(self._all_headers(), self.appended_at_ms)

    @property
    def is_held(self) -> bool:
        """Whether it is neither settled nor lost."""
        return not self.is_settled and self._lease.expires_at >= monotonic()

    @property
    def is_settled(self) -> bool:
        """True after `ack`, `release` or `reject`, and once the consumer has given the message back."""
        return self._verb is not None or self._offset not in self._lease.held

    @property
    def settled_by(self) -> str:
        """The verb that settled it: `ack`, `release`, `reject`, or empty."""
        return "" if self._verb is None else self._verb.value

    def ack(self) -> None:
        """
        Say that the message is done; it is not delivered again.

        Returns before the marker is written; `QueueConsumer.flush` waits for it.

        Raises:
            LeaseLostError: The lease ran out before. The END is written all the same and wins if the message was not
                redelivered yet.
            UsageError: It was released or rejected before.
        """
        lease = self._lease
        try:
            lease.held.remove(self._offset)
        except KeyError:
            self._settled_before(Verb.ACK)
            return
        self._verb = _ACK
        lease.outbox.acked.append(self._offset)
        if lease.expires_at < monotonic():
            self._raise_lost()

    def release(self, delay: float | timedelta = 0) -> None:
        """
        Give the message back, to be delivered again after *delay* and no later; the delivery counts.

        Args:
            delay: How long it rests before, seconds or a timedelta, 0 to 12 hours. The queue's backoff is not added.

        Raises:
            ConfigError: *delay* is out of bounds.
            LeaseLostError: The lease ran out before; it is or will be delivered again anyway.
            UsageError: It was acknowledged or rejected before.
        """
        delay_ms = milliseconds("delay", delay)
        self._settle(Settled(Verb.RELEASE, self._offset, delay_ms=delay_ms))

    def reject(self, reason: str = "") -> None:
        """
        Send the message to the dead-letter topic: it is not delivered again.

        Args:
            reason: Why, kept with the dead letter; at most 1,000 characters of it.

        Raises:
            LeaseLostError: The lease ran out before; it may be delivered again instead.
            UsageError: It was acknowledged or released before.
        """
        self._settle(Settled(Verb.REJECT, self._offset, reason=str(reason)[:MAX_TEXT_CHARS]))

    def extend(self, duration: float | timedelta) -> None:
        """
        Hold this message for another time, counted from now; other messages keep their leases.

        Keep-alive goes on with the new length, up to the consumer's `max_lease_ms`; an extension may go beyond it.

        Args:
            duration: Length of the lease from now on, seconds or a timedelta, 1 second to 12 hours; may be shorter
                than what is left.

        Raises:
            ConfigError: *duration* is out of bounds.
            LeaseLostError: The lease ran out before; it is or will be delivered again.
            UsageError: The message is settled.
        """
        duration_ms = milliseconds("duration", duration, MIN_LEASE_MS)
        lease, now = self._lease, monotonic()
        if self._verb is not None or (self._offset not in lease.held and not lease.fate):
            self._raise_settled("extend")
        if lease.fate or lease.expires_at < now:
            self._raise_lost()
        extended = lease.for_one(self._offset, duration_ms / 1000, now)
        # The new lease first: a thread that acknowledges meanwhile finds the message in the one or the other.
        self._lease = extended
        try:
            lease.held.remove(self._offset)
        except KeyError:
            extended.held.discard(self._offset)
            self._lease = lease
            self._raise_settled("extend")
        lease.outbox.extended.append(extended)

    def _finish(self, default: Verb, delay: float, error: str = "") -> Verb:
        """Settle by *default*, a failure with its *error*, unless it is settled; return what settled it; for `run`."""
        if self._verb is None:
            if default is Verb.ACK:
                self.ack()
            else:
                # The handler raised: the queue's backoff is added to the delay.
                delay_ms = milliseconds("delay", delay)
                self._settle(Settled(Verb.RELEASE, self._offset, delay_ms, reason=error, has_failed=True))
        return self._verb or default

    def _expire(self) -> bool:
        """End the message if its time to live was over at its START, and return whether it was; for the consumer."""
        at_ms = self.expires_at_ms
        if at_ms is None or self._lease.started_at_ms < at_ms or self.is_settled:
            return False
        self._lease.held.discard(self._offset)
        self._verb = Verb.EXPIRE
        self._lease.outbox.others.append(Settled(Verb.EXPIRE, self._offset))
        return True

    def _release_unseen(self) -> bool:
        """Give the message back uncounted; False if it is settled or lost. For the consumer."""
        if self.is_settled or self._lease.expires_at < monotonic():
            return False
        self._settle(Settled(Verb.RELEASE, self._offset, never_handed_out=True))
        return True

    def _check_held(self) -> None:
        """Raise if the message is not held any more; for transactions."""
        lease = self._lease
        if self._verb is None and lease.expires_at < monotonic():
            self._raise_lost()
        if self._offset not in lease.held:
            self._settled_before(Verb.ACK)
            message = (
                f"message {self.id.text} is settled already: got an ack in a transaction, "
                f"{self.settled_by or 'another'} came first; settle a message once"
            )
            raise UsageError(message)

    def _enter_transaction(self) -> tuple[Lease, float]:
        """
        Settle the message for the time of a commit, so that no other thread can; for transactions.

        Returns:
            The lease that held it, and when that ends at the earliest, monotonic seconds.
        """
        self._check_held()
        lease = self._lease
        # Read before the removal: a renewal that is sent after it does not cover this message.
        ends_at = lease.expires_at
        try:
            lease.held.remove(self._offset)
        except KeyError:
            self._check_held()
            raise
        self._verb = Verb.ACK
        return lease, ends_at

    def _leave_transaction(self, lease: Lease) -> None:
        """Undo `_enter_transaction`: nothing was written, or that is unknown. *lease* holds the message from now on."""
        self._lease = lease
        self._verb = None

    def _settle(self, settled: Settled) -> None:
        lease = self._lease
        try:
            lease.held.remove(self._offset)
        except KeyError:
            self._settled_before(settled.verb)
            return
        self._verb = settled.verb
        lease.outbox.others.append(settled)
        if lease.expires_at < monotonic():
            self._raise_lost()

    def _settled_before(self, verb: Verb) -> None:
        if self._verb is None and self._lease.fate:
            self._raise_lost()
        if self._verb not in (None, verb):
            self._raise_settled(verb.value)

    def _raise_settled(self, verb: str) -> NoReturn:
        message = (
            f"message {self.id.text} is settled already: got {verb}, "
            f"{self.settled_by or 'another thread'} came first; settle a message once"
        )
        raise UsageError(message)

    def _raise_lost(self) -> NoReturn:
        why = self._lease.fate or "the lease ran out"
        message = (
            f"lease of message {self.id.text} is lost: {why}; expect it to be delivered again, "
            "raise lease_ms where handlers need longer"
        )
        raise LeaseLostError(message)

    def _all_headers(self) -> list[tuple[str, bytes | None]]:
        headers = self._record.headers()
        # The stub's type is what may be sent; what is received is always pairs with bytes.
        return cast("list[tuple[str, bytes | None]]", headers or [])
