"""
The allowed names of queues, subscriptions and logical queues.

Rule 1: names occur in topic names, metric labels, file paths and SQL. They are therefore limited to the characters of
Kafka topic names, and to a length that leaves room for suffixes.
"""

from __future__ import annotations

import re
from typing import TypeGuard

from kmq_spark.errors import ConfigError

LONGEST_QUEUE, LONGEST_SUBSCRIPTION = 200, 100
"""Largest number of characters of a name."""

QUEUE_NAME = rf"[A-Za-z0-9._-]{{1,{LONGEST_QUEUE}}}"
SUBSCRIPTION_NAME = rf"[A-Za-z0-9._-]{{1,{LONGEST_SUBSCRIPTION}}}"

_SHOWN_CHARS = 60


def is_name(name: object, longest: int = LONGEST_QUEUE) -> TypeGuard[str]:
    """Return whether *name* is an allowed name of at most *longest* characters."""
    return isinstance(name, str) and len(name) <= longest and re.fullmatch(QUEUE_NAME, name) is not None


def name_error(what: str, name: object, longest: int = LONGEST_QUEUE) -> ConfigError:
    """Return the error for a name that is not allowed."""
    shown = repr(name)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}… ({len(name if isinstance(name, str) else shown)} characters)"
    return ConfigError(
        f"{what} name is not allowed: got {shown}, 1 to {longest} of A-Z a-z 0-9 . _ -; choose another name"
    )
