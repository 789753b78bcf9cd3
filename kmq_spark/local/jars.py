"""
Provide the jars of the embedded broker and of Spark: locked by sha256, fetched once, kept in a cache.

Rule 1: `jars.lock` lists every jar with its sha256, including dependencies. Only these jars are put on a class path.
Rule 2: a set is verified first, then put into the cache with one rename. The cache never has an incomplete set.
Rule 3: the two sets are never mixed, because the broker and Spark need different versions of kafka-clients.

Ivy's own checksums come from the same repository as the jars, so they prove nothing; the lock file does.
`python -m kmq_spark.local.jars fetch` fills the cache, `… lock` computes the sums in the lock file again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.errors import KmqError, SetupError
from kmq_spark.local.java import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCK_FILE = Path(__file__).with_name("jars.lock")

_COMPLETE = "complete.json"
"""File with the size of each jar, written last. A set without this file is incomplete."""

_LOCK_HEADER = """\
# Every jar that the embedded broker and Spark load: coordinate and sha256, dependencies included.
# Change a coordinate here, then run `python -m kmq_spark.local.jars lock`, and review the difference.
"""


STALL_LIMIT_S = 30.0
"""A fetch is aborted after this time without new bytes; Ivy itself would wait for minutes for each jar."""

_POLL_INTERVAL_S = 0.2


class LockedJar(NamedTuple):
    """A jar of the lock file: Maven coordinate `group:artifact:version`, and sha256 in hex."""

    coordinate: str
    sha256: str

    @property
    def ivy_name(self) -> str:
        """File name that Ivy uses for the jar."""
        group, artifact, version = self.coordinate.split(":")
        return f"{group}_{artifact}-{version}.jar"

    @property
    def plain_name(self) -> str:
        """File name of the jar in the Spark distribution."""
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


def jar_paths(jar_set: str) -> list[Path]:
    """
    Return the jars of a set (`broker` or `spark`) in the order of the lock file; fetch them first if need be.

    The sha256 sums are verified when the jars are put into the cache; later calls only compare file sizes, which takes
    about a millisecond.
    """
    wanted = _locked(jar_set)
    try:
        home = _cached(jar_set, wanted)
    except OSError as error:
        raise SetupError(_disk_failure(error)) from error
    return [home / jar.ivy_name for jar in wanted]


def cache_folder() -> Path:
    """Return `kmq-spark` in the user's cache directory (`XDG_CACHE_HOME`, by default `~/.cache`); it may not exist."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches, "kmq-spark").absolute()


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold an exclusive file lock. Other processes wait; the kernel releases the lock when the holder ends."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def cache_directory() -> Path:
    """Return the directory of all jar sets: `KMQ_JARS_DIR`, or `jars` in the cache folder."""
    if chosen := os.environ.get("KMQ_JARS_DIR"):
        return Path(chosen).absolute()
    return cache_folder() / "jars"


def read_lock() -> dict[str, list[LockedJar]]:
    """Read the lock file; return the jars of each set."""
    tables = tomllib.loads(LOCK_FILE.read_text(encoding="utf-8"))
    return {jar_set: [LockedJar(*row) for row in table.items()] for jar_set, table in tables.items()}


def write_lock() -> None:
    """Fetch every coordinate of the lock file and write the current sha256 sums to it."""
    parts = [_LOCK_HEADER]
    for jar_set, jars in read_lock().items():
        with tempfile.TemporaryDirectory() as temporary:
            staged = _stage(jar_set, jars, Path(temporary), Path(temporary, "ivy.log"))
            rows = [f'"{jar.coordinate}" = "{_sha256(staged / jar.ivy_name)}"\n' for jar in sorted(jars)]
        parts.append(f"\n[{jar_set}]\n{''.join(rows)}")
    LOCK_FILE.write_text("".join(parts), encoding="utf-8")


def _locked(jar_set: str) -> list[LockedJar]:
    """Return the jars of one set."""
    sets = read_lock()
    if jar_set not in sets:
        message = f"unknown jar set: got {jar_set!r}, allowed {', '.join(map(repr, sets))}; see {LOCK_FILE}"
        raise SetupError(message)
    return sets[jar_set]


def _cached(jar_set: str, wanted: Sequence[LockedJar]) -> Path:
    """Return the directory of a complete set; fetch the set first if it is missing or damaged."""
    cache = cache_directory()
    home = cache / f"{jar_set}-{_digest(wanted)}"
    if _is_complete(home, wanted):
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with exclusive(cache / f"{jar_set}.lock"):
        if _is_complete(home, wanted):  # another process fetched it while this one waited
            return home
        for left_over in cache.glob(f".{jar_set}-*"):  # from a fetch that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        sys.stderr.write(f"kmq: fetching {len(wanted)} {jar_set} jars into {cache}, once\n")
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{jar_set}-") as temporary:
            staged = _stage(jar_set, wanted, Path(temporary), cache / f"{jar_set}.log")
            _verify(staged, wanted)
            sizes = {jar.ivy_name: (staged / jar.ivy_name).stat().st_size for jar in wanted}
            (staged / _COMPLETE).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
            if home.exists():  # damaged; a rename needs a free name
                shutil.rmtree(home)
            staged.rename(home)
    return home


def _stage(jar_set: str, wanted: Sequence[LockedJar], temporary: Path, log: Path) -> Path:
    """Collect the jars of a set in a new directory; they are not yet verified."""
    staged = temporary / "set"
    staged.mkdir()
    missing = []
    for jar in wanted:
        # pyspark contains some of them. Its Ivy does not fetch scala-library, because every Spark has one.
        shipped = _shipped_with_spark(jar)
        if shipped is None:
            missing.append(jar)
        else:
            shutil.copyfile(shipped, staged / jar.ivy_name)
    if not missing:
        return staged
    fetched = _fetch_with_ivy([jar.coordinate for jar in missing], temporary / "ivy", log=log, title=jar_set)
    for jar in missing:
        source = fetched / jar.ivy_name
        if not source.is_file():
            message = f"cannot fetch the {jar_set} jars: no {jar.coordinate} in the repository; see {log}"
            raise SetupError(message)
        source.rename(staged / jar.ivy_name)
    return staged


def _shipped_with_spark(jar: LockedJar) -> Path | None:
    """Return the jar in the installed pyspark package, or None if it has none with the locked sha256."""
    spec = importlib.util.find_spec("pyspark")  # does not import pyspark
    for location in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(location, "jars", jar.plain_name)
        if candidate.is_file() and jar.sha256 in ("", _sha256(candidate)):
            return candidate
    return None


def _verify(staged: Path, wanted: Sequence[LockedJar]) -> None:
    """Raise an error if the sha256 of any jar differs from the lock file."""
    for jar in wanted:
        got = _sha256(staged / jar.ivy_name)
        if got != jar.sha256:
            message = (
                f"sha256 of {jar.coordinate} is not the locked one: got {got}, locked {jar.sha256}; "
                "the repository serves another file: ask its operator, do not edit the lock file"
            )
            raise SetupError(message)


def _is_complete(home: Path, wanted: Sequence[LockedJar]) -> bool:
    """Return whether the set is complete and every jar has its expected size."""
    try:
        sizes = json.loads((home / _COMPLETE).read_text(encoding="utf-8"))
        return all((home / jar.ivy_name).stat().st_size == sizes[jar.ivy_name] for jar in wanted)
    except (OSError, ValueError, KeyError):
        return False


def _digest(wanted: Sequence[LockedJar]) -> str:
    """Return a digest of these jars, so that a changed lock file does not use an old cache directory."""
    lines = "".join(f"{jar.coordinate}={jar.sha256}\n" for jar in wanted)
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _sha256(file: Path) -> str:
    """Return the sha256 of a file in hex."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _disk_failure(error: OSError) -> str:
    """Return the error text for a cache that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    repair = "free 300 MB there" if full else "make it writable"
    cache = cache_directory()
    return f"cannot write the jar cache {cache}: {error.strerror}; {repair}, or set KMQ_JARS_DIR to another disk"


def _fetch_with_ivy(coordinates: Sequence[str], into: Path, *, log: Path, title: str) -> Path:
    """Fetch exactly these coordinates; return the folder of the jars, named `<group>_<artifact>-<version>.jar`."""
    java_home = find_java().parent.parent
    jars = into / "jars"
    # First try an empty home directory: a Maven cache with a pom but without its jar makes Ivy fail. Then try the
    # user's home, because without a network its Maven cache may be the only source.
    into.mkdir(parents=True, exist_ok=True)
    homes = [Path(tempfile.mkdtemp(dir=into, prefix="home-"))]
    homes += [Path.home()] if Path.home().joinpath(".m2", "repository").is_dir() else []
    for home in homes:
        ivy = _start(into, coordinates, _environment(java_home, home), log)
        if _wait(ivy, into):
            return jars
    if "No module named 'pyspark'" in log.read_text(errors="replace"):
        message = f"cannot fetch the {title} jars: pyspark is not installed; run pip install 'kmq-spark[spark]'"
        raise SetupError(message)
    message = (
        f"cannot fetch the {title} jars: Ivy failed, or no byte came for {STALL_LIMIT_S:.0f} s (log: {log}); check the "
        "network and that 300 MB are free, or copy the jar cache of another machine and set KMQ_JARS_DIR to it"
    )
    raise SetupError(message)


def _environment(java_home: Path, home: Path) -> dict[str, str]:
    """Return this environment without variables that would select another Spark or load the user's packages."""
    unwanted = {"SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "SPARK_REMOTE"}
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    arguments = f"--driver-java-options '-Duser.home={home}' pyspark-shell"
    return kept | {
        "JAVA_HOME": str(java_home),
        "PYSPARK_SUBMIT_ARGS": arguments,
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Spark resolves its host name at start, which takes half a minute if no name server answers.
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def _start(into: Path, coordinates: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start Ivy with its output in the log file, in a process of its own, so that its JVM ends with it."""
    command = [sys.executable, "-m", "kmq_spark.local.jars", "ivy", str(into), ",".join(coordinates)]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)


def _wait(ivy: subprocess.Popen[bytes], directory: Path) -> bool:
    """Wait until Ivy ends, or no byte has come for `STALL_LIMIT_S`; return whether it succeeded."""
    seen, moved_at = -1, time.monotonic()
    try:
        while ivy.poll() is None and time.monotonic() - moved_at < STALL_LIMIT_S:
            files = [Path(parent, name) for parent, _, names in os.walk(directory) for name in names]
            size = sum(file.stat().st_size for file in files if file.exists())
            if size != seen:
                seen, moved_at = size, time.monotonic()
            time.sleep(_POLL_INTERVAL_S)
        return ivy.poll() == 0
    finally:
        ivy.kill()
        ivy.wait()


def _run_ivy(ivy_dir: str, coordinates: str) -> None:
    """Fetch coordinates, separated by commas, into `<ivy_dir>/jars`, with the Ivy of the pyspark package."""
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415  # no other command needs pyspark

    gateway = launch_gateway()  # type: ignore[no-untyped-call]  # pyspark leaves it untyped
    try:
        jvm = gateway.jvm
        no_settings_file = jvm.scala.Option.empty()
        # What `spark-submit --packages` runs. Spark has a default repository and reads `DEFAULT_ARTIFACT_REPOSITORY`.
        resolve = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies
        transitive, exclusions, more_repositories = False, "", ""
        resolve(transitive, exclusions, coordinates, more_repositories, ivy_dir, no_settings_file)
    finally:
        gateway.shutdown()


def main(arguments: list[str]) -> int:
    """Fetch the sets, print the paths of a set, or write the lock; return the exit code."""
    try:
        match arguments:
            case ["fetch", *sets]:
                for jar_set in sets or read_lock():
                    jar_paths(jar_set)
            case ["paths", jar_set]:
                sys.stdout.write("".join(f"{path}\n" for path in jar_paths(jar_set)))
            case ["lock"]:
                write_lock()
            case ["ivy", ivy_dir, coordinates]:
                _run_ivy(ivy_dir, coordinates)
            case _:
                sys.stderr.write("usage: python -m kmq_spark.local.jars fetch [SET …] | paths SET | lock\n")
                return 2
    except KmqError as error:
        sys.stderr.write(f"kmq: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
