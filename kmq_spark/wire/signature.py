"""
Sign and verify the markers that only a tracker writes: TICK, RULES, and END with REDELIVERED or DEAD_LETTERED.

Rule 1: the signature is the last field of the record. It covers all bytes before it, and the markers partition. It is
verified on the raw record bytes, so it does not depend on how a serializer orders fields.
Rule 2: each queue has one random key. It is stored in the offset metadata of the tracker's consumer group, which
consumers may not read. It is never written to the markers topic, which some consumers may read.

Source: HMAC (RFC 2104) with SHA-256, truncated to 128 bits.
"""

from __future__ import annotations

import hmac
import secrets

from kmq_spark.core.markers import Marker, MarkerType, Outcome

KEY_BYTES = 32

_SIGNATURE_BYTES = 16
_HEAD = b"\x82\x01\x10"  # tag of field 16 with wire type 2 (length-delimited), then length 16
_BY_TRACKER = frozenset({Outcome.REDELIVERED, Outcome.DEAD_LETTERED})


def new_key() -> bytes:
    """Return a new random key for a queue."""
    return secrets.token_bytes(KEY_BYTES)


def signed(value: bytes, marker_partition: int, key: bytes) -> bytes:
    """
    Append the signature to a record.

    Args:
        value: An encoded marker.
        marker_partition: Markers partition that the record is written to.
        key: Key of the queue; with an empty key the record is returned unchanged.
    """
    return value + _HEAD + _digest(value, marker_partition, key) if key else value


def is_signed(value: bytes, marker_partition: int, key: bytes) -> bool:
    """Return whether a record has a valid signature for this partition and key."""
    body, head, signature = value[:-19], value[-19:-16], value[-16:]
    return head == _HEAD and hmac.compare_digest(signature, _digest(body, marker_partition, key))


def needs_signature(marker: Marker) -> bool:
    """Return whether only a tracker may write such a marker."""
    if marker.type is MarkerType.END:
        return marker.outcome in _BY_TRACKER
    return marker.type in {MarkerType.TICK, MarkerType.RULES}


def _digest(body: bytes, marker_partition: int, key: bytes) -> bytes:
    return hmac.digest(key, b"%d:%b" % (marker_partition, body), "sha256")[:_SIGNATURE_BYTES]
