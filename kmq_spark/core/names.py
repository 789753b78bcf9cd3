"""
What queues, groups of consumers and logical queues may be called.

Rule 1: names reach topic names, metric labels, file paths and SQL, so Kafka's own alphabet and room for a suffix.
"""

from __future__ import annotations

import re
from typing import TypeGuard

from kmq_spark.errors import ConfigError

LONGEST_QUEUE, LONGEST_GROUP = 200, 100
"""Characters of a name."""

QUEUE_NAME = rf"[A-Za-z0-9._-]{{1,{LONGEST_QUEUE}}}"
GROUP_NAME = rf"[A-Za-z0-9._-]{{1,{LONGEST_GROUP}}}"

_SHOWN_CHARS = 60


def is_name(name: object, longest: int = LONGEST_QUEUE) -> TypeGuard[str]:
    """Return whether something is a name, of at most so many characters."""
    return isinstance(name, str) and len(name) <= longest and re.fullmatch(QUEUE_NAME, name) is not None


def name_error(what: str, name: object, longest: int = LONGEST_QUEUE) -> ConfigError:
    """
    Return the error that tells of a name that is none.

    Args:
        what: Whose: `queue`, `group`, `logical queue`.
        name: As it was given.
        longest: Characters that it may have.
    """
    shown = repr(name)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[:_SHOWN_CHARS]}… ({len(name if isinstance(name, str) else shown)} characters)"
    return ConfigError(
        f"{what} name is not allowed: got {shown}, 1 to {longest} of A-Z a-z 0-9 . _ -; choose another name"
    )
