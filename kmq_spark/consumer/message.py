"""
One delivery of a message, the three ways to settle it, and how to extend its lease.

Rule 1: settling costs a `set.remove` and a `list.append`. Another thread writes the marker.
Rule 2: a settlement after the lease has ended raises LeaseLostError, but its marker is still written: an END before the
tracker's decision takes effect.
Rule 3: settling a message twice with the same verb is allowed. A different verb is an error.

Source: SQS `ReceiveMessage` and Kafka's share consumer for the verbs. The glossary explains why there is no `nack`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from confluent_kafka.serialization import MessageField, SerializationContext

from kmq_spark.consumer.leases import Settled, Verb
from kmq_spark.core.durations import MIN_LEASE_MS, milliseconds
from kmq_spark.core.markers import MAX_ERROR_CHARS, MAX_TEXT_CHARS, MessageId
from kmq_spark.errors import LeaseLostError, UnreadableError, UsageError
from kmq_spark.kafka.clock import now_s
from kmq_spark.wire.headers import ORIGIN, PREFIX, expires_at_ms_of, first_sent_ms_of, place_of

if TYPE_CHECKING:
    from datetime import timedelta

    from confluent_kafka import Message as KafkaMessage

    from kmq_spark.consumer.leases import Lease


_ACK = Verb.ACK
"""A global name costs a fifth of an enum attribute; `ack` may be called a million times a second."""


class Message:
    """
    One delivery of a message, held until it is settled or its lease ends.

    Created by `QueueConsumer`. Any thread of the process that received it may settle it.
    """

    __slots__ = ("_lease", "_offset", "_record", "_verb")

    def __init__(self, record: KafkaMessage, offset: int, lease: Lease) -> None:
        self._record = record
        self._offset = offset
        self._lease = lease
        self._verb: Verb | None = None

    def __repr__(self) -> str:
        """Return identity and state, without the content."""
        state = "held" if self._verb is None else self._verb.value
        return f"<Message {self.id.queue_partition}:{self._offset} delivery {self.delivery_count} {state}>"

    @property
    def value(self) -> bytes | None:
        """The payload as it was sent."""
        return self._record.value()

    @property
    def data(self) -> Any:  # noqa: ANN401  # any object
        """
        The payload as the consumer's deserializer reads it, each time anew.

        Raises:
            UnreadableError: The deserializer raised. In a handler of `run` this makes a dead letter.
            UsageError: The consumer has no deserializer.
        """
        table = self._lease.outbox.table
        if table is None or table.deserializer is None:
            message = "consumer has no deserializer: got a call of data; give it one, such as JsonDeserializer()"
            raise UsageError(message)
        context = SerializationContext(self._record.topic() or "", MessageField.VALUE, self.headers)  # type: ignore[arg-type]  # the stub describes headers to send
        try:
            return table.deserializer(self.value, context)
        except Exception as error:
            raise UnreadableError(f"value cannot be read: {text_of_failure(error)}") from error

    @property
    def key(self) -> bytes | None:
        """The key as it was sent."""
        return self._record.key()

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers as they were sent, in order, without those of kmq-spark."""
        return [(name, value) for name, value in self._all_headers() if not name.startswith(PREFIX)]

    @property
    def id(self) -> MessageId:
        """Queue partition and offset of this copy. Each redelivery has a new id; `origin` stays the same."""
        return MessageId(self._lease.queue_partition, self._offset)

    @property
    def origin(self) -> MessageId:
        """Queue partition and offset of the first copy: the same for every delivery of a message."""
        return place_of(self._all_headers(), ORIGIN) or self.id

    @property
    def delivery_count(self) -> int:
        """Count of deliveries so far, including this one: 1 on the first delivery."""
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
        """When the message expires, epoch milliseconds, broker clock; None if it has no TTL."""
        return expires_at_ms_of(self._all_headers(), self.appended_at_ms)

    @property
    def is_held(self) -> bool:
        """Whether it is not settled and its lease has not ended."""
        return not self.is_settled and self._lease.ends_at >= now_s()

    @property
    def is_settled(self) -> bool:
        """True after `ack`, `release` or `reject`, and after the consumer has released the message."""
        return self._verb is not None or self._offset not in self._lease.held

    @property
    def settled_by(self) -> str:
        """The verb that settled it: `ack`, `release` or `reject`; empty if no call did."""
        return "" if self._verb is None else self._verb.value

    def ack(self) -> None:
        """
        Acknowledge the message: it is done and is not delivered again.

        This method returns before the marker is written; `QueueConsumer.flush` waits for it.

        Raises:
            LeaseLostError: The lease ran out earlier. The END is still written and takes effect if the message is not
                redelivered yet.
            UsageError: The message was released or rejected earlier.
        """
        lease = self._lease
        try:
            lease.held.remove(self._offset)
        except KeyError:
            self._settled_before(Verb.ACK)
            return
        self._verb = _ACK
        lease.outbox.acked.append(self._offset)
        if lease.ends_at < now_s():
            self._raise_lost()

    def release(self, delay: float | timedelta = 0) -> None:
        """
        Release the message for redelivery after *delay*. This delivery counts.

        Args:
            delay: Time until the message is due for redelivery, seconds or a timedelta, 0 to 12 hours. The queue's
                backoff is not added.

        Raises:
            ConfigError: *delay* is out of bounds.
            LeaseLostError: The lease ran out earlier; the message is redelivered anyway.
            UsageError: The message was acknowledged or rejected earlier.
        """
        delay_ms = milliseconds("delay", delay)
        self._settle(Settled(Verb.RELEASE, self._offset, delay_ms=delay_ms))

    def reject(self, reason: str = "") -> None:
        """
        Reject the message: the tracker sends it to the dead-letter topic, and it is not delivered again.

        Args:
            reason: Text to store with the dead letter, cut to 1,000 characters.

        Raises:
            LeaseLostError: The lease ran out earlier; the message may be redelivered instead.
            UsageError: The message was acknowledged or released earlier.
        """
        self._settle(Settled(Verb.REJECT, self._offset, reason=str(reason)[:MAX_TEXT_CHARS]))

    def fail(self, error: BaseException | str, delay: float | timedelta = 0) -> None:
        """
        Release the message because its work failed, as `run` does if a handler raises. This delivery counts.

        Args:
            error: What went wrong. It is stored with the delivery, and with the dead letter after the last one.
            delay: Time until the message is due for redelivery, to which the queue's backoff is added, seconds or a
                timedelta, 0 to 12 hours.

        Raises:
            ConfigError: *delay* is out of bounds.
            LeaseLostError: The lease ran out earlier; the message is redelivered anyway.
            UsageError: The message was acknowledged or rejected earlier.
        """
        self._settle(failure_of(error, milliseconds("delay", delay))._replace(message_offset=self._offset))

    def extend(self, duration: float | timedelta) -> None:
        """
        Set a new lease length for this message, counted from now. Other messages keep their leases.

        Keep-alive renews the lease with the new length, up to the consumer's `max_lease`. The extension itself may
        exceed `max_lease`.

        Args:
            duration: Length of the lease from now, seconds or a timedelta, 1 second to 12 hours. It may be shorter
                than the remaining time.

        Raises:
            ConfigError: *duration* is out of bounds.
            LeaseLostError: The lease ran out earlier; the message is redelivered.
            UsageError: The message is settled already.
        """
        duration_ms = milliseconds("duration", duration, MIN_LEASE_MS)
        lease, now = self._lease, now_s()
        if self._verb is not None or (self._offset not in lease.held and not lease.end_reason):
            self._raise_settled("extend")
        if lease.end_reason or lease.ends_at < now:
            self._raise_lost()
        extended = lease.for_one(self._offset, duration_ms / 1000, now)
        # Set the new lease first: a thread that acknowledges at the same time finds the message in one of the two.
        self._lease = extended
        try:
            lease.held.remove(self._offset)
        except KeyError:
            extended.held.discard(self._offset)
            self._lease = lease
            self._raise_settled("extend")
        lease.outbox.extended.append(extended)

    def _finish(self, kind: Settled | None) -> Verb:
        """Settle so, or acknowledge, unless the handler has settled it. Return the verb. For `run`."""
        if self._verb is None:
            if kind is None:
                self.ack()
            else:
                self._settle(kind._replace(message_offset=self._offset))
        return self._verb or Verb.ACK

    def _expire(self) -> bool:
        """End the message if it had expired at its START. Return whether it had. For the consumer."""
        at_ms = self.expires_at_ms
        if at_ms is None or self._lease.started_at_ms < at_ms or self.is_settled:
            return False
        self._lease.held.discard(self._offset)
        self._verb = Verb.EXPIRE
        self._lease.outbox.others.append(Settled(Verb.EXPIRE, self._offset))
        return True

    def _release_uncounted(self) -> bool:
        """Release the message, delivery not counted. Return False if it is settled or lost. For the consumer."""
        if self.is_settled or self._lease.ends_at < now_s():
            return False
        self._settle(Settled(Verb.RELEASE, self._offset, never_handed_out=True))
        return True

    def _check_held(self) -> None:
        """Raise if the message is no longer held. For transactions."""
        lease = self._lease
        if self._verb is None and lease.ends_at < now_s():
            self._raise_lost()
        if self._offset not in lease.held:
            self._settled_before(Verb.ACK)
            message = (
                f"message {self.id.text} is already settled: got ack in a transaction "
                f"after {self.settled_by or 'a call in another thread'}; settle a message once"
            )
            raise UsageError(message)

    def _enter_transaction(self) -> tuple[Lease, float]:
        """Settle the message during a commit, so that no other thread can. Return its lease, and its end by then."""
        self._check_held()
        lease = self._lease
        # Read before the removal: a renewal that is sent after the removal does not cover this message.
        ends_at = lease.ends_at
        try:
            lease.held.remove(self._offset)
        except KeyError:
            self._check_held()
            raise
        self._verb = Verb.ACK
        return lease, ends_at

    def _leave_transaction(self, lease: Lease) -> None:
        """Undo `_enter_transaction`: nothing was written, or the outcome is unknown. *lease* is the new lease."""
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
        if lease.ends_at < now_s():
            self._raise_lost()

    def _settled_before(self, verb: Verb) -> None:
        if self._verb is None and self._lease.end_reason:
            self._raise_lost()
        if self._verb not in (None, verb):
            self._raise_settled(verb.value)

    def _raise_settled(self, verb: str) -> NoReturn:
        message = (
            f"message {self.id.text} is already settled: got {verb} "
            f"after {self.settled_by or 'a call in another thread'}; settle a message once"
        )
        raise UsageError(message)

    def _raise_lost(self) -> NoReturn:
        why = self._lease.end_reason or "the lease ran out"
        message = (
            f"lease of message {self.id.text} is lost: {why}; the message may be delivered again, "
            "raise max_lease if handlers take longer"
        )
        raise LeaseLostError(message)

    def _all_headers(self) -> list[tuple[str, bytes | None]]:
        headers = self._record.headers()
        # The type stub describes headers to send. Received headers are always pairs of a name and bytes or None.
        return cast("list[tuple[str, bytes | None]]", headers or [])


def failure_of(error: BaseException | str, delay_ms: int = 0) -> Settled:
    """Return the release of a message whose work failed; its offset is not set."""
    return Settled(Verb.RELEASE, -1, delay_ms, text_of_failure(error), has_failed=True)


def text_of_failure(error: BaseException | str) -> str:
    """Return type and message of an exception, such as `ValueError: no such order`, or a text, as `one_line` does."""
    if isinstance(error, str):
        return one_line(error)
    name = type(error).__name__
    try:
        message = str(error)[:MAX_ERROR_CHARS]
    except Exception:  # noqa: BLE001  # `__str__` of a handler's exception may raise anything
        message = "(its message cannot be read)"
    return one_line(f"{name}: {message}" if message else name)


def one_line(text: str) -> str:
    """Return text as one printable line, cut to `MAX_ERROR_CHARS`."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS])
