"""The archive of Spark's classes: what it depends on, and that everything works without it; no JVM is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kmq_spark.errors import SetupError
from kmq_spark.spark import class_archive
from kmq_spark.spark.class_archive import build_archive, find_archive, java_option
from kmq_spark.spark.session import session_settings


class Installation:
    """A Java, a Spark and connector jars that are empty files."""

    def __init__(self, folder: Path) -> None:
        """Create them."""
        self.modules = _file(folder / "java" / "lib" / "modules")
        self.java = _file(folder / "java" / "bin" / "java")
        self.spark_jar = _file(folder / "spark" / "jars" / "spark-core.jar")
        self.jars = [_file(folder / "connector.jar")]


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    path.chmod(0o755)
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """An installation, and an empty cache."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Installation(tmp_path)


def make(patch: pytest.MonkeyPatch, jars: list[Path], contents: str = "classes") -> Path:
    """Build an archive without Spark; return its path."""

    def run_spark(folder: Path, _: object) -> Path:
        (folder / "classes.jsa").write_text(contents)
        return folder / "classes.jsa"

    patch.setattr(class_archive, "_run_spark", run_spark)
    return build_archive(jars)


def test_archive_is_found_where_it_was_written(
    installed: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make(monkeypatch, installed.jars)
    assert archive.parent == tmp_path / "cache" / "kmq-spark" / "classes"
    assert archive == find_archive(installed.jars)


@pytest.mark.parametrize("changed", ["modules", "spark_jar", "connector", "new jar", "touched", "no connector"])
def test_what_is_installed_anew_asks_for_another_archive(
    installed: Installation, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which then takes the place of the old one."""
    before, jars = make(monkeypatch, installed.jars), installed.jars
    if changed == "no connector":
        jars = []
    elif changed == "new jar":
        _file(installed.spark_jar.with_name("another.jar"))
    elif changed == "touched":  # installed once more, in the same version
        os.utime(installed.spark_jar, ns=(1, 1))
    else:
        {"modules": installed.modules, "spark_jar": installed.spark_jar, "connector": jars[0]}[changed].write_text("1")
    assert find_archive(jars) is None
    after = make(monkeypatch, jars)
    assert after == find_archive(jars)
    assert list(after.parent.glob("*.jsa")) == [after] != [before]


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "longer"])
def test_damaged_archive_is_not_used_and_the_next_build_replaces_it(
    installed: Installation, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java does not look: with half a file it crashes."""
    archive = make(monkeypatch, installed.jars)
    archive.write_text({"truncated": "clas", "empty": "", "changed": "glasses", "longer": "classes\0"}[damage])
    assert java_option(installed.jars) == ""
    assert make(monkeypatch, installed.jars) == find_archive(installed.jars)


def test_another_collector_asks_for_another_archive(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch, installed.jars)
    monkeypatch.setattr(class_archive, "COLLECTOR", "-XX:+UseG1GC")
    assert find_archive(installed.jars) is None


def test_two_installations_have_archives_beside_each_other(
    installed: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(monkeypatch, installed.jars)
    (tmp_path / "spark").rename(tmp_path / "another")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "another"))
    another = make(monkeypatch, installed.jars)
    assert sorted(one.parent.glob("*.jsa")) == sorted([one, another])


def test_no_options_without_an_archive(installed: Installation) -> None:
    assert java_option(installed.jars) == ""
    assert "SharedArchiveFile" not in session_settings(installed.jars)["spark.driver.extraJavaOptions"]


def test_session_uses_the_archive_of_its_jars_and_no_other(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(monkeypatch, installed.jars)
    assert java_option(installed.jars).startswith(f"-XX:SharedArchiveFile={path} -Xshare:auto -Xlog:cds*=off")
    ours, theirs = session_settings(installed.jars), session_settings([])
    assert f"-XX:SharedArchiveFile={path}" in ours["spark.driver.extraJavaOptions"].split()
    assert "SharedArchiveFile" not in theirs["spark.driver.extraJavaOptions"]


def test_path_with_a_space_is_one_option(
    installed: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's launcher splits the options as a shell does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    path = make(monkeypatch, installed.jars)
    assert java_option(installed.jars).startswith(f"'-XX:SharedArchiveFile={path}' ")


@pytest.mark.parametrize("missing", ["java", "modules", "connector", "home"])
def test_no_options_where_something_is_missing(
    installed: Installation, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark itself then says what is wrong, or works."""
    if missing == "home":

        def no_home() -> Path:
            raise RuntimeError

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
    else:
        {"java": installed.java, "modules": installed.modules, "connector": installed.jars[0]}[missing].unlink()
    assert java_option(installed.jars) == ""
    with pytest.raises(SetupError, match=r"^cannot archive Spark's classes: got .*; set JAVA_HOME"):
        build_archive(installed.jars)


def test_build_leaves_an_archive_that_fits_as_it_is(
    installed: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(monkeypatch, installed.jars)
    assert "archiving Spark's classes" in capsys.readouterr().err
    assert make(monkeypatch, installed.jars, "others") == first
    assert capsys.readouterr().err == ""


def test_cache_that_cannot_be_written_is_one_line(installed: Installation, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert java_option(installed.jars) == ""
    with pytest.raises(
        SetupError, match=r"^cannot archive Spark's classes: got .* set XDG_CACHE_HOME to another disk$"
    ):
        build_archive(installed.jars)


def test_spark_that_fails_leaves_no_archive(installed: Installation, tmp_path: Path) -> None:
    """Its Java is an empty file."""
    with pytest.raises(SetupError, match=r"^cannot archive Spark's classes: got exit code 1 of Spark; go on without"):
        build_archive(installed.jars)
    assert [file.suffix for file in (tmp_path / "cache" / "kmq-spark" / "classes").iterdir()] == [".lock"]


def test_build_deletes_what_a_killed_one_left(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make(monkeypatch, installed.jars)
    left_over = _file(archive.parent / f".{archive.name.partition('-')[0]}-killed" / "classes.jsa").parent
    of_another = _file(archive.parent / ".0123456789ab-running" / "classes.jsa").parent
    archive.unlink()
    make(monkeypatch, installed.jars)
    assert (left_over.exists(), of_another.exists()) == (False, True)


@pytest.mark.parametrize("arguments", [[], ["fetch"]])
def test_other_arguments_are_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert class_archive.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_command_prints_the_options_and_one_line_where_it_fails(
    installed: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    jars = [str(jar) for jar in installed.jars]
    assert class_archive.main(["option", *jars]) == 0
    assert capsys.readouterr().out == "\n"
    installed.modules.unlink()
    assert class_archive.main(["build", *jars]) == 1
    assert capsys.readouterr().err.startswith("kmq: cannot archive Spark's classes")
