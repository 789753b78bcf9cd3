"""
The partition of a group: murmur2 of its name, as Kafka's own clients partition by key.

Source: Kafka `Utils.murmur2`, public domain hash of Austin Appleby.
"""

from __future__ import annotations

_SEED, _FACTOR, _SHIFT, _WORD = 0x9747B28C, 0x5BD1E995, 24, 4
_BITS_32 = 0xFFFFFFFF


def partition_of(group: str, partition_count: int) -> int:
    """
    Return the partition in which the records of a group lie.

    Args:
        group: Name of the group.
        partition_count: Partitions of the coordination topic, at least 1.
    """
    return (murmur2(group.encode()) & 0x7FFFFFFF) % partition_count


def murmur2(data: bytes) -> int:
    """Return the 32-bit hash of bytes, unsigned."""
    length = len(data)
    value = _SEED ^ length
    whole = length - length % _WORD
    for start in range(0, whole, _WORD):
        part = int.from_bytes(data[start : start + _WORD], "little") * _FACTOR & _BITS_32
        part = (part ^ part >> _SHIFT) * _FACTOR & _BITS_32
        value = value * _FACTOR & _BITS_32 ^ part
    if whole < length:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _BITS_32
    value = (value ^ value >> 13) * _FACTOR & _BITS_32
    return value ^ value >> 15
