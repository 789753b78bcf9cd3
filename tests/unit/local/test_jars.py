"""The jar cache: whole and verified, or not there. No JVM: the jars come from a stand-in for Spark's own folder."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from pathlib import Path

import pytest

from kmq_spark.errors import SetupError
from kmq_spark.local import jars, java

JAR = b"PK\x03\x04 not really a jar"
COORDINATE = "org.example:thing_2.13:1.0"


@pytest.fixture
def spark_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package called pyspark that ships one jar, a lock file of one set that names it, and an empty cache."""
    folder = tmp_path / "site" / "pyspark" / "jars"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "thing_2.13-1.0.jar").write_bytes(JAR)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    monkeypatch.setattr(jars, "LOCK_FILE", tmp_path / "jars.lock")
    monkeypatch.setenv("KMQ_JARS_DIR", str(tmp_path / "cache"))
    _lock(tmp_path, hashlib.sha256(JAR).hexdigest())
    return folder


def _lock(tmp_path: Path, sha256: str) -> None:
    """Write a lock file of one jar."""
    (tmp_path / "jars.lock").write_text(f'[broker]\n"{COORDINATE}" = "{sha256}"\n')


def test_set_enters_the_cache_whole(spark_folder: Path, tmp_path: Path) -> None:
    [path] = jars.jar_paths("broker")

    assert path.read_bytes() == JAR
    assert path.parent.parent == tmp_path / "cache"
    assert path.name == "org.example_thing_2.13-1.0.jar"
    assert {file.name for file in path.parent.iterdir()} == {path.name, "complete.json"}
    # Nothing half-made stays beside it.
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {path.parent.name, "broker.lock"}


def test_second_call_reads_the_cache_alone(spark_folder: Path) -> None:
    first = jars.jar_paths("broker")
    (spark_folder / "thing_2.13-1.0.jar").unlink()

    assert jars.jar_paths("broker") == first


def test_damaged_set_is_fetched_again(spark_folder: Path) -> None:
    [path] = jars.jar_paths("broker")
    path.write_bytes(b"cut")

    assert jars.jar_paths("broker") == [path]
    assert path.read_bytes() == JAR


def test_left_over_of_a_killed_fetch_is_swept(spark_folder: Path, tmp_path: Path) -> None:
    left_over = tmp_path / "cache" / ".broker-abc"
    left_over.mkdir(parents=True)

    jars.jar_paths("broker")

    assert not left_over.exists()


def test_changed_lock_file_never_meets_an_old_cache(spark_folder: Path, tmp_path: Path) -> None:
    [old] = jars.jar_paths("broker")
    newer = b"another build"
    (spark_folder / "thing_2.13-1.0.jar").write_bytes(newer)
    _lock(tmp_path, hashlib.sha256(newer).hexdigest())

    [new] = jars.jar_paths("broker")

    assert new.parent != old.parent
    assert (old.read_bytes(), new.read_bytes()) == (JAR, newer)


def test_jar_with_another_sum_is_refused(tmp_path: Path) -> None:
    wanted = [jars.LockedJar(COORDINATE, "0" * 64)]
    (tmp_path / wanted[0].ivy_name).write_bytes(JAR)

    with pytest.raises(
        SetupError, match=r"sha256 of org\.example:thing_2\.13:1\.0 is not the locked one: got [0-9a-f]{64}"
    ):
        jars._verify(tmp_path, wanted)


def test_two_processes_fetch_once(spark_folder: Path) -> None:
    forks = multiprocessing.get_context("fork")
    with forks.Pool(4) as pool:
        found = pool.map(jars.jar_paths, ["broker"] * 8)

    assert len({tuple(paths) for paths in found}) == 1
    assert found[0][0].read_bytes() == JAR


def test_failed_fetch_is_one_line_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jars, "find_java", lambda: tmp_path / "bin" / "java")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SetupError, match=r"^cannot fetch the broker jars: .*; check the network and .*KMQ_JARS_DIR"):
        jars._fetch_with_ivy([COORDINATE], tmp_path / "ivy", log=tmp_path / "log", title="broker")


def test_shipped_lock_file_pins_every_jar_of_both_sets() -> None:
    sets = jars.read_lock()

    assert set(sets) == {"broker", "spark"}
    for locked in sets.values():
        assert all(len(jar.sha256) == 64 and jar.coordinate.count(":") == 2 for jar in locked)
        assert locked == sorted(locked)


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023', 21),
        ("?", None),
    ],
)
def test_java_version_is_read_in_old_and_new_form(tmp_path: Path, printed: str, version: int | None) -> None:
    assert java.java_version(_fake_java(tmp_path, printed)) == version


def test_old_java_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_java(tmp_path, 'java version "1.8.0_392"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")

    with pytest.raises(
        SetupError, match=r"Java 17 or newer is needed: got .*/bin/java is version 8; install OpenJDK 17"
    ):
        java.find_java()


def _fake_java(home: Path, printed: str) -> Path:
    """Write a program that says what a Java of that version says."""
    program = home / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{printed}' >&2\n")
    program.chmod(0o755)
    return program
