"""A function that is forgotten."""

from __future__ import annotations

import gc
import weakref

import pytest

from kmq_spark.errors import KmqError
from kmq_spark.spark.callbacks import Callback


class Client:
    """What a query uses."""


def test_callback_calls_its_function_until_it_is_forgotten() -> None:
    """Then it keeps nothing that the function used, though somebody keeps the callback."""
    client, called = Client(), []
    alive = weakref.ref(client)
    callback = Callback(lambda batch_id, used=client: called.append((batch_id, type(used))))
    del client
    callback(7)
    assert called == [(7, Client)]
    callback.forget()
    gc.collect()
    assert alive() is None
    with pytest.raises(KmqError, match="a query that has ended: nothing is sent; the next query runs it"):
        callback(8)
    assert len(called) == 1
