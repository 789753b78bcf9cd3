"""One process for many queues."""

from __future__ import annotations

import resource

import pytest

from kmq_spark.errors import SetupError
from kmq_spark.spark.session import streaming_settings
from kmq_spark.tracker.service import allow_open_files


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of open files of a process, soft and hard."""
    limits = [1_024, 8_192]

    def change(_kind: int, wanted: tuple[int, int]) -> None:
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", change)
    return limits


def test_limit_of_open_files_is_raised_as_far_as_the_queues_need(limits: list[int]) -> None:
    allow_open_files(10)
    assert limits == [1_024, 8_192]
    allow_open_files(50)
    assert limits == [4_150, 8_192]


def test_more_queues_than_the_system_allows_are_refused_with_the_number(limits: list[int]) -> None:
    with pytest.raises(SetupError, match=r"got 200; expected at most 100 with 8192 open files; raise the limit"):
        allow_open_files(200)
    limits[:] = [1_024, resource.RLIM_INFINITY]
    allow_open_files(100)
    assert limits == [8_150, resource.RLIM_INFINITY]


@pytest.mark.parametrize(("queues", "delay"), [(0, "10ms"), (1, "10ms"), (20, "200ms"), (80, "500ms")])
def test_queries_of_a_process_look_for_markers_the_less_often_the_more_they_are(queues: int, delay: str) -> None:
    """Each look asks the broker: 50 that looked a hundred times a second each kept more than a core busy."""
    assert streaming_settings(2, queues)["spark.sql.streaming.pollingDelay"] == delay
