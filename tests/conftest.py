"""What every tier shares: one broker and one Spark session a worker, started when the first test asks for them."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.workers import GROUPS_FILE, GroupScheduling, last_resort, longest_first, write_groups

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from pyspark.sql import SparkSession
    from xdist.workermanage import WorkerController

    from kmq_spark.local.broker import EmbeddedBroker

# A shared machine may be slow for a moment: time is measured in benchmarks, not here.
settings.register_profile("kmq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kmq")

# For every JVM of Spark, ours and those of processes that tests start: within a test none earns back what the second
# compiler takes, on two cores least of all. Without it Java reserves a fifth of the room for compiled code, which
# Delta's tables fill within a minute; what then needs a new method handle takes the JVM down.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")

_stderr = pytest.StashKey[int]()
_groups = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep a stderr that is not captured, for a test that hangs; let Ctrl+C reach what tests start."""
    config.stash[_stderr] = os.dup(2)
    # A shell ignores it for what it starts in the background, and every process started from there inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Bound every test, wherever it hangs."""
    with last_resort(item, item.config.stash[_stderr]):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Say to a worker where its groups go."""
    node.workerinput[GROUPS_FILE] = str(_groups_file(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:  # noqa: ANN401  # xdist's
    """Spread tests by group where the command line says `--dist loadgroup`."""
    is_ours = config.getoption("dist") == "loadgroup"
    return GroupScheduling(config, log, _groups_file(config)) if is_ours else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start what takes longest first, where several processes share the tests."""
    if GROUPS_FILE in getattr(config, "workerinput", {}):
        items[:] = longest_first(items, float(config.getini("timeout")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the groups before the controller gets the list of tests."""
    if file := getattr(session.config, "workerinput", {}).get(GROUPS_FILE):
        write_groups(session.items, Path(file))


def _groups_file(config: pytest.Config) -> Path:
    """Return the file of groups of this run, in a folder that goes with it."""
    if _groups not in config.stash:
        config.stash[_groups] = tempfile.TemporaryDirectory(prefix="kmq-tests-")
        config.add_cleanup(config.stash[_groups].cleanup)
    return Path(config.stash[_groups].name) / "groups.json"


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Take off what a command that ran in this process logs with: its stderr ends with the test."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    """
    One broker for all tests of a worker, so tests name their queues apart.

    A test that stops, kills or pauses a broker makes its own.
    """
    from faults.campaign import BROKER_SETTINGS  # noqa: PLC0415  # the unit tier runs without
    from tests.brokers import end_clients, quick_broker  # noqa: PLC0415  # as above

    # A killed consumer's session is waited for: it may ask for less than Kafka's least of six seconds.
    extra = {**BROKER_SETTINGS, "group.min.session.timeout.ms": "1000"}
    with quick_broker(extra=extra) as running:
        yield running
        end_clients()


@pytest.fixture(scope="session")
def bootstrap_servers(broker: EmbeddedBroker) -> str:
    """Where clients of the shared broker connect."""
    return broker.bootstrap_servers


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark session for the whole session: local, two cores, UTC, no UI, with the locked connector jars."""
    from kmq_spark.local.jars import jar_paths  # noqa: PLC0415  # the unit tier runs without Spark
    from kmq_spark.spark.session import build_session, delta_settings, session_settings  # noqa: PLC0415

    settings = session_settings(jar_paths("spark")) | delta_settings()
    session = build_session("kmq-tests", master="local[2]", settings=settings)
    yield session
    session.stop()
