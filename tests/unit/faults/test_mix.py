"""What the campaign's messages and workers use by the seed."""

from __future__ import annotations

import random

from faults.mix import DELAYED, EXPIRING, LOGICAL_QUEUE, NAMED, WAYS, Mix, ask
from kmq_spark.producer.options import option_headers

DRAWS = 5_000


def test_message_has_the_headers_that_its_event_names() -> None:
    """The checker compares them: what the product writes for the same arguments."""
    generator = random.Random(1)
    for _ in range(DRAWS):
        asked = ask(generator)
        options = {name: asked.options.get(name) for name in ("logical_queue", "delay", "ttl")}
        found = option_headers(at=None, **options)
        written = {name: value.decode() for name, value in found if isinstance(value, bytes)}
        assert written == asked.headers


def test_shares_of_what_messages_ask_for_are_as_named() -> None:
    generator = random.Random(2)
    drawn = [ask(generator).options for _ in range(DRAWS)]
    for name, share in (("logical_queue", NAMED), ("delay", DELAYED), ("ttl", EXPIRING)):
        assert abs(sum(name in options for options in drawn) / DRAWS - share) < 0.03
    assert {options["logical_queue"] for options in drawn if "logical_queue" in options} == {LOGICAL_QUEUE}


def test_workers_use_each_way_once_before_one_comes_again() -> None:
    """In an order of the seed's."""
    for seed in range(5):
        mix = Mix(seed, "f1")
        ways = [mix.way() for _ in WAYS]
        assert sorted(map(str, ways)) == sorted(map(str, WAYS.values()))
        assert mix.way() == ways[0]
    assert len({str(Mix(seed, "f1").way()) for seed in range(20)}) > 1
