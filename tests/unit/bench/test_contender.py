"""The consumers with which ours are compared."""

from __future__ import annotations

from confluent_kafka import Consumer, ShareConsumer

from bench.contender import Work, of_group, of_share_group

WORK = Work("127.0.0.1:1", "orders", "readers")


def test_settings_of_each_consumer_are_ones_that_it_knows() -> None:
    """A client that is made refuses a setting that is not its own; `log_level` keeps what it says of the broker."""
    Consumer({**of_group(WORK), "log_level": 0}).close()
    ShareConsumer({**of_share_group(WORK), "log_level": 0}).close()
