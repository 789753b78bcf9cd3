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
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.cache import cache_folder, exclusive
from kmq_spark.errors import KmqError, SetupError
from kmq_spark.local.jar_fetch import fetch_with_ivy

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCK_FILE = Path(__file__).with_name("jars.lock")

_COMPLETE = "complete.json"
"""File with the size of each jar, written last. A set without this file is incomplete."""

_LOCK_HEADER = """\
# Every jar that the embedded broker and Spark load: coordinate and sha256, dependencies included.
# Change a coordinate here, then run `python -m kmq_spark.local.jars lock`, and review the difference.
"""


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
    Return the jars of a set; fetch them first if they are not in the cache.

    Args:
        jar_set: `broker` or `spark`, a table of `jars.lock`.

    Returns:
        Absolute paths in the order of the lock file. The sha256 sums are verified when the jars are put into the cache;
        later calls only compare file sizes, which takes about a millisecond.

    Raises:
        SetupError: The set is unknown, cannot be fetched, or does not match the lock file.
    """
    wanted = _locked(jar_set)
    try:
        home = _cached(jar_set, wanted)
    except OSError as error:
        raise SetupError(_disk_failure(error)) from error
    return [home / jar.ivy_name for jar in wanted]


def cache_directory() -> Path:
    """Return the directory of all jar sets: `KMQ_JARS_DIR`, or `kmq-spark/jars` in the user's cache directory."""
    if chosen := os.environ.get("KMQ_JARS_DIR"):
        return Path(chosen).absolute()
    return cache_folder() / "jars"


def read_lock() -> dict[str, list[LockedJar]]:
    """Read the lock file; return the jars of each set."""
    tables = tomllib.loads(LOCK_FILE.read_text(encoding="utf-8"))
    return {jar_set: [LockedJar(*row) for row in table.items()] for jar_set, table in tables.items()}


def write_lock() -> None:
    """
    Fetch every coordinate of the lock file and write the current sha256 sums to it.

    Raises:
        SetupError: A coordinate cannot be fetched.
    """
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
    fetched = fetch_with_ivy([jar.coordinate for jar in missing], temporary / "ivy", log=log, title=jar_set)
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


def main(arguments: list[str]) -> int:
    """
    Run `fetch [SET …]`, `paths SET` or `lock` from the command line.

    Returns:
        Exit code: 0 = success, 1 = failure (one line on stderr), 2 = wrong arguments.
    """
    try:
        match arguments:
            case ["fetch", *sets]:
                for jar_set in sets or read_lock():
                    jar_paths(jar_set)
            case ["paths", jar_set]:
                sys.stdout.write("".join(f"{path}\n" for path in jar_paths(jar_set)))
            case ["lock"]:
                write_lock()
            case _:
                sys.stderr.write("usage: python -m kmq_spark.local.jars fetch [SET …] | paths SET | lock\n")
                return 2
    except KmqError as error:
        sys.stderr.write(f"kmq: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
