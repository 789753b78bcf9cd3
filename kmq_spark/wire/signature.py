"""
Signatures of the markers that only a tracker writes: TICK, RULES, and END as REDELIVERED or DEAD_LETTERED.

Rule 1: the signature is the last field of the record, and covers every byte before it, and the markers partition. So it
is checked on the bytes as they lie in the log, whatever a serializer makes of them.
Rule 2: the key is random, one a queue, and lies in the metadata of the tracker group's offsets, which consumers may not
read. It is never in the markers topic, which some of them may.

Source: HMAC (RFC 2104) with SHA-256, cut to 128 bits.
"""

from __future__ import annotations

import hmac
import secrets

from kmq_spark.core.markers import Marker, MarkerType, Outcome

KEY_BYTES = 32

_SIGNATURE_BYTES = 16
_HEAD = b"\x82\x01\x10"  # field 16 of kind 2 (length and bytes), length 16
_BY_TRACKER = frozenset({Outcome.REDELIVERED, Outcome.DEAD_LETTERED})


def new_key() -> bytes:
    """Return the key of a queue that has none."""
    return secrets.token_bytes(KEY_BYTES)


def signed(value: bytes, marker_partition: int, key: bytes) -> bytes:
    """
    Return a record with its signature.

    Args:
        value: An encoded marker.
        marker_partition: Where it is going to lie.
        key: Of the queue; empty for none, then the record stays as it is.
    """
    return value + _HEAD + _digest(value, marker_partition, key) if key else value


def is_signed(value: bytes, marker_partition: int, key: bytes) -> bool:
    """Return whether a record carries the signature of its queue's trackers."""
    body, head, signature = value[:-19], value[-19:-16], value[-16:]
    return head == _HEAD and hmac.compare_digest(signature, _digest(body, marker_partition, key))


def needs_signature(marker: Marker) -> bool:
    """Return whether only a tracker writes such a marker."""
    if marker.type is MarkerType.END:
        return marker.outcome in _BY_TRACKER
    return marker.type in {MarkerType.TICK, MarkerType.RULES}


def _digest(body: bytes, marker_partition: int, key: bytes) -> bytes:
    return hmac.digest(key, b"%d:%b" % (marker_partition, body), "sha256")[:_SIGNATURE_BYTES]
