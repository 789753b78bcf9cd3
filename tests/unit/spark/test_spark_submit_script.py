"""`spark-submit.sh`: what it adds for a cluster and for local mode, and the archive it sends; no JVM is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kmq_spark.errors import SetupError
from kmq_spark.local import archive
from kmq_spark.local.jars import read_lock
from kmq_spark.spark.session import session_settings

ROOT = Path(__file__).parents[3]
JOB = "jobs/redelivery_tracker.py"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that knows a `spark-submit` which prints its arguments, a line each, and two jars."""
    submit = tmp_path / "spark-submit"
    submit.write_text('#!/bin/sh\nprintf "%s\\n" "python=$PYSPARK_PYTHON" "driver=$PYSPARK_DRIVER_PYTHON" "$@"\n')
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *kmq_spark.local.jars*) printf '/jars/a.jar\\n/jars/b.jar\\n' ;;\n"
        "  *kmq_spark.local.archive*) echo /archive.zip ;;\n"
        f"  *) echo {submit} ;;\n"
        "esac\n"
    )
    for each in (submit, program):
        each.chmod(0o755)
    return program


def submitted(python: Path, *arguments: str, **environment: str) -> list[str]:
    """Return what `spark-submit` was given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "PYSPARK_"))}
    done = subprocess.run(
        [str(ROOT / "spark-submit.sh"), *arguments],
        capture_output=True, text=True, check=True, env={**kept, "PYSPARK_PYTHON": str(python), **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


def after(option: str, arguments: list[str]) -> str:
    """Return the value of an option that is given once."""
    assert arguments.count(option) == 1
    return arguments[arguments.index(option) + 1]


@pytest.mark.parametrize(
    "named",
    [
        ["--master", "spark://host:7077"],
        ["--master=spark://host:7077"],
        ["--conf", "spark.master=yarn"],
        ["--master", "local-cluster[2,1,1024]"],
    ],
)
def test_cluster_gets_the_package_and_the_locked_jars(python: Path, named: list[str]) -> None:
    arguments = submitted(python, *named, JOB, "orders")
    assert after("--py-files", arguments) == "/archive.zip"
    assert after("--jars", arguments) == "/jars/a.jar,/jars/b.jar"
    assert "spark.python.unix.domain.socket.enabled=true" not in arguments
    assert arguments[-len(named) - 2 :] == [*named, JOB, "orders"]


def test_settings_of_the_user_stand_beside_ours(python: Path, tmp_path: Path) -> None:
    """Java's options are the defaults, which come first; there is one collector; three of his defaults are kept."""
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.driver.memory 5g\nspark.redaction.regex=(?i)pin\nspark.driver.defaultJavaOptions: -Dtheir=own\n"
    )
    collector = "-XX:+UseSerialGC"
    (plain,) = [each for each in submitted(python, JOB) if "defaultJavaOptions" in each]
    assert "-Xss16m" in plain
    assert collector in plain
    theirs = submitted(python, JOB, JAVA_TOOL_OPTIONS="-XX:+UseG1GC", SPARK_CONF_DIR=str(tmp_path))
    assert collector not in " ".join([*theirs, *submitted(python, "--driver-java-options", "-XX:+UseZGC", JOB)])
    assert any("-Xss16m" in each and each.endswith(" -Dtheir=own") for each in theirs)
    assert after("--driver-memory", theirs) == "5g"
    assert any(each.startswith("spark.redaction.regex=") and each.endswith("|private.?key|(?i)pin") for each in theirs)


def test_local_mode_leaves_the_collector_to_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.extraJavaOptions -XX:+UseParallelGC\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert "GC" not in session_settings()["spark.driver.defaultJavaOptions"]


def test_sockets_have_a_short_path(python: Path) -> None:
    """Whatever `java.io.tmpdir` is; on a cluster it is an administrator who enables them."""
    assert "spark.python.unix.domain.socket.dir=/tmp" in submitted(python, "--master", "yarn", JOB)
    assert len(session_settings()["spark.python.unix.domain.socket.dir"]) + len("/.") + 40 < 107


@pytest.mark.parametrize("named", [[], ["--master", "local"], ["--master", "local[4]"]])
def test_local_mode_runs_the_checkout_itself(python: Path, named: list[str]) -> None:
    """Also where an argument of the job looks like one of spark-submit's."""
    assert "--py-files" not in submitted(python, *named, JOB, "--master", "spark://host:7077")


def test_packages_go_in_place_of_the_locked_jars(python: Path) -> None:
    """Never both: two versions of the connector on one class path."""
    ours = submitted(python, JOB, KMQ_PACKAGES="1")
    theirs = submitted(python, "--packages", "a:b:1", JOB)
    assert "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0" in after("--packages", ours)
    assert {*after("--packages", ours).split(",")} <= {jar.coordinate for jar in read_lock()["spark"]}
    assert after("--packages", theirs) == "a:b:1"
    assert "--jars" not in ours + theirs


def test_executors_may_have_another_interpreter_than_the_driver(python: Path) -> None:
    assert submitted(python, JOB)[:2] == [f"python={python}", f"driver={python}"]
    apart = submitted(python, JOB, PYSPARK_PYTHON="/opt/kmq/bin/python", PYSPARK_DRIVER_PYTHON=str(python))
    assert apart[:2] == ["python=/opt/kmq/bin/python", f"driver={python}"]


def test_archive_of_one_checkout_is_one_file_that_python_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the archive alone: what an executor needs of this package, and the files beside its code."""
    monkeypatch.setenv("KMQ_JARS_DIR", str(tmp_path / "one"))
    one = archive.package_archive()
    written_at = one.stat().st_mtime_ns
    assert (archive.package_archive(), one.stat().st_mtime_ns) == (one, written_at)
    monkeypatch.setenv("KMQ_JARS_DIR", str(tmp_path / "another"))
    assert archive.package_archive().read_bytes() == one.read_bytes()
    assert "kmq_spark/local/jars.lock" in zipfile.ZipFile(one).namelist()
    program = "import kmq_spark.tracker.fold_rows as module; print(module.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(one)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.startswith(str(one)), done.stderr


def test_changed_file_is_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kmq_spark"
    package.mkdir()
    (package / "a.py").write_text("A = 1\n")
    monkeypatch.setattr(archive, "PACKAGE", package)
    monkeypatch.setenv("KMQ_JARS_DIR", str(tmp_path / "cache"))
    before = archive.package_archive()
    (package / "a.py").write_text("A = 2\n")
    assert archive.package_archive() != before


def test_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KMQ_JARS_DIR", str(tmp_path / "file"))
    with pytest.raises(SetupError, match=r"^cannot write the package for the executors: got .* set KMQ_JARS_DIR"):
        archive.package_archive()


@pytest.mark.parametrize("file", ["spark-submit.sh", "databricks.yml", "kmq_spark/spark/session.py"])
@pytest.mark.parametrize(
    "key",
    ["kafka.ssl.keystore.key", "kafka.ssl.key.password", "kafka.sasl.jaas.config", "kafka.ssl.truststore.password"],
)
def test_spark_redacts_what_may_be_a_secret_wherever_it_is_started(file: str, key: str) -> None:
    """The private key of the Java client is in a setting without the word password or secret."""
    found = re.search(r"spark\.redaction\.regex\"?[=:] *\"?(?:\(\?i\))([^'\"\n]+)", (ROOT / file).read_text("utf-8"))
    assert found is not None
    assert re.search(found[1], key, re.IGNORECASE) is not None


def test_kafka_clients_are_kept_for_all_markers_partitions(python: Path) -> None:
    """By default 64 of them: with more partitions Spark would open a client for each in each batch."""
    name = "spark.kafka.consumer.cache.capacity"
    capacity = session_settings()[name]
    assert f"{name}={capacity}" in submitted(python, JOB)
    assert f'{name}: "{capacity}"' in (ROOT / "databricks.yml").read_text("utf-8")
