"""What a sender may ask of a message, and what it may not."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from kmq_spark.errors import ConfigError
from kmq_spark.producer.options import option_headers, wait_ms

NEW_YEAR_MS = b"1893456000000"
"""2030, epoch milliseconds."""


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({}, []),
        ({"logical_queue": "emails"}, [("kmq-logical-queue", b"emails")]),
        ({"logical_queue": "a" * 200}, [("kmq-logical-queue", b"a" * 200)]),
        ({"delay": 1.5}, [("kmq-delay-ms", b"1500")]),
        ({"delay": timedelta(minutes=1)}, [("kmq-delay-ms", b"60000")]),
        ({"delay": 0}, []),
        ({"at": datetime(2030, 1, 1, tzinfo=UTC)}, [("kmq-not-before-ms", b"1893456000000")]),
        ({"at": datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))}, [("kmq-not-before-ms", NEW_YEAR_MS)]),
        ({"at": 1_893_456_000}, [("kmq-not-before-ms", b"1893456000000")]),
        ({"ttl": 60, "delay": 1}, [("kmq-delay-ms", b"1000"), ("kmq-ttl-ms", b"60000")]),
    ],
)  # fmt: skip
def test_options_become_headers(options: dict[str, Any], headers: list[tuple[str, bytes]]) -> None:
    assert option_headers(**options) == headers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": -1}, "delay is out of bounds: got -1, at least 0 seconds"),
        ({"delay": 1, "at": 1}, "message has two delivery times: got delay=1 and at=1, one is"),
        ({"at": datetime(2030, 1, 1)}, "at has no time zone: got datetime.datetime"),  # noqa: DTZ001  # on purpose
        ({"at": True}, "at is out of bounds: got True"),
        ({"at": math.nan}, "at is out of bounds: got nan"),
        ({"at": -1}, "at is out of bounds: got -1, 1970 to 9999"),
        ({"at": "tomorrow"}, "at is out of bounds: got 'tomorrow'"),
        ({"ttl": 0}, "ttl is out of bounds: got 0, more than 0 seconds"),
        ({"ttl": False}, "ttl is out of bounds: got False"),
        ({"logical_queue": ""}, "logical queue name is not allowed: got '', 1 to 200"),
        ({"logical_queue": "q" * 300}, r"logical queue name is not allowed: got 'q{59}… \(300 characters\), 1 to 200"),
    ],
)
def test_bad_option_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        option_headers(**options)


def test_wait_until_the_first_delivery() -> None:
    assert wait_ms(timedelta(hours=1), None, now_s=0) == 3_600_000
    assert wait_ms(None, 100, now_s=40) == 60_000
    assert wait_ms(None, 40, now_s=100) == 0
    assert wait_ms(None, None, now_s=0) == 0
