"""Markers that the broker does not confirm."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from typing import TYPE_CHECKING

from kmq_spark.consumer.marker_producer import MarkerProducer
from kmq_spark.core.markers import Marker, MarkerType, OffsetRange
from tests.limits import COMES_S

if TYPE_CHECKING:
    import pytest

END = Marker(MarkerType.END, 0, (OffsetRange(7, 1),))


def test_end_that_was_not_confirmed_in_time_is_sent_again_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The topic may contain it twice then: the log says so, once in a while."""
    # No broker listens on port 1.
    config = {"bootstrap.servers": "127.0.0.1:1", "delivery.timeout.ms": 100, "linger.ms": 0}
    logger = "kmq_spark.consumer.marker_producer"
    with closing(MarkerProducer(config, "orders.markers")) as producer, caplog.at_level(logging.WARNING, logger):
        producer.send_until_durable(END)
        producer.send_until_durable(END)
        give_up_s = time.monotonic() + COMES_S
        while not caplog.records and time.monotonic() < give_up_s:
            producer.serve(0.1)
        assert producer.is_waiting
        # `close` drops what is not sent, and says so.
        (line,) = list(caplog.records)
    assert (line.name, getattr(line, "action", "")) == (logger, "markers_resent")
