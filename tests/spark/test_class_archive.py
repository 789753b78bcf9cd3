"""The archive of Spark's classes in a real Java: it is used, and one that does not fit is ignored without a word."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kmq_spark.local.jars import cache_directory, jar_paths
from kmq_spark.local.java import find_java
from kmq_spark.spark.class_archive import build_archive, find_archive, java_option

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SESSION = """
from kmq_spark.local.jars import jar_paths
from kmq_spark.spark.session import build_session, session_settings

session = build_session("archive", master="local[2]", settings=session_settings(jar_paths("spark")))
jvm = session._jsc.hadoopConfiguration()
assert jvm.getClassByNameOrNull("org.apache.spark.sql.kafka010.KafkaSourceProvider") is not None
assert session.range(3).count() == 3
session.stop()
"""
SPARKS = "org.apache.spark.SparkContext"
CONNECTORS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
FROM_ARCHIVE = "shared objects file (top)"


@pytest.fixture
def archive() -> Path:
    """The archive that `make` has built."""
    found = find_archive(jar_paths("spark"))
    assert found is not None, "run make .venv/.classes"
    return found


def use(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Use another cache directory, with the jars of the usual one."""
    patch.setenv("KMQ_JARS_DIR", str(cache_directory()))
    patch.setenv("XDG_CACHE_HOME", str(folder))


def classes_of_a_session(folder: Path) -> tuple[dict[str, str], str]:
    """Return where Java took the classes of a new session from, and what the session printed on stderr."""
    log = folder / "classes.log"
    options = f"{os.environ['SPARK_SUBMIT_OPTS']} -Xlog:class+load:file={log}"
    done = subprocess.run(
        [sys.executable, "-c", SESSION], env={**os.environ, "SPARK_SUBMIT_OPTS": options},
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    lines = [line.rpartition("] ")[2].partition(" source: ") for line in log.read_text("utf-8").splitlines()]
    return {name: source for name, _, source in lines}, done.stderr


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("archive")
def test_session_takes_sparks_and_the_connectors_classes_from_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints what it prints without one."""
    sources, printed = classes_of_a_session(tmp_path)
    assert sources[SPARKS] == sources[CONNECTORS] == FROM_ARCHIVE
    use(tmp_path, monkeypatch)
    sources_without, printed_without = classes_of_a_session(tmp_path)
    assert FROM_ARCHIVE not in sources_without.values()
    assert printed == printed_without


@pytest.mark.timeout(900)
def test_session_starts_with_a_truncated_archive(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java itself maps half a file, and crashes."""
    damaged = tmp_path / "kmq-spark" / "classes" / archive.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    use(tmp_path, monkeypatch)
    sources, _ = classes_of_a_session(tmp_path)
    assert FROM_ARCHIVE not in sources.values()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("reason", ["other class path", "other collector", "deleted meanwhile", "garbage meanwhile"])
def test_java_ignores_an_archive_that_does_not_fit_without_a_word(
    archive: Path, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "kmq-spark" / "classes" / archive.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(archive.read_bytes())
    use(tmp_path, monkeypatch)
    options = shlex.split(java_option(jar_paths("spark")))
    assert options[0].endswith(copy.name)
    if reason == "deleted meanwhile":
        copy.unlink()
    elif reason == "garbage meanwhile":
        copy.write_bytes(b"garbage" * 10_000)
    java = [str(find_java()), "-XX:+UseG1GC" if reason == "other collector" else "-XX:+UseSerialGC"]
    # It maps the archive before it looks for the class, which it does not find.
    without, used = (
        subprocess.run([*java, *each, "-cp", str(tmp_path), "NoClass"], check=False, capture_output=True, text=True)
        for each in ([], options)
    )
    assert (used.returncode, used.stdout, used.stderr) == (without.returncode, without.stdout, without.stderr)


@pytest.mark.long  # it reads all classes twice
@pytest.mark.timeout(900)
def test_two_builds_at_once_make_one_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(tmp_path, monkeypatch)
    with ThreadPoolExecutor() as builds:
        first, second = builds.map(lambda _: build_archive(jar_paths("spark")), range(2))
    assert first == second
    assert list(first.parent.glob("*.jsa")) == [first]
