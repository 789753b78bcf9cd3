"""Names of tracker fleets: the coordination group of a fleet."""

from __future__ import annotations

from kmq_spark.core.coordination.records import MAX_GROUP_CHARS, is_group
from kmq_spark.errors import ConfigError

FLEET_PREFIX = "kmq.fleet."
"""Prefix of the groups of tracker fleets, so that no other group has such a name."""


def fleet_group(name: str) -> str:
    """
    Return the coordination group of a fleet.

    Raises:
        ConfigError: The name is not allowed.
    """
    if not name or not is_group(FLEET_PREFIX + name):
        message = (
            f"fleet name is not allowed: got {name!r:.80}, 1 to {MAX_GROUP_CHARS - len(FLEET_PREFIX)} of A-Z a-z 0-9 "
            ". _ -; choose another name"
        )
        raise ConfigError(message)
    return FLEET_PREFIX + name
