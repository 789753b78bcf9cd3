"""
Start the JVM of a local Spark sooner: an archive of the classes that the tracker and the ledger load (AppCDS).

Rule 1: an archive never changes what Spark does. Java ignores one that was made for another Java or class path.
Rule 2: a damaged one is not used: Java does not read it through, and would crash. Its name contains its CRC-32.
Rule 3: its name contains a digest of all that must not change, so what is installed anew asks for another archive.
Rule 4: without an archive, without a Java or without a cache everything works as before.

`python -m kmq_spark.spark.class_archive build JAR …` writes the archive if it is missing, `… option JAR …` prints the
options that use it. The jars are those of the session (`python -m kmq_spark.local.jars paths spark`).

Source: JEP 350, "Dynamic CDS Archives".
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kmq_spark.cache import cache_folder, exclusive
from kmq_spark.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLLECTOR = "-XX:+UseSerialGC"
"""The garbage collector of a local Spark. Java may not use an archive that it wrote with another one."""

QUIET = "-Xlog:cds*=off -Xlog:class+path=off"
"""Otherwise Java prints on stdout that an archive does not fit, and stdout belongs to the command."""

_BUILD_TIMEOUT_S = 600


class _Place(NamedTuple):
    """Where an archive belongs: the digest of the paths of Java and Spark, and that of everything."""

    folder: Path
    installation: str
    inputs: str

    @property
    def stem(self) -> str:
        """What the name begins with; the CRC-32 follows."""
        return f"{self.installation}-{self.inputs}-"


def find_archive(jars: Iterable[Path] = ()) -> Path | None:
    """
    Return the archive that fits the installed Java and Spark and is undamaged; None where there is none.

    Args:
        jars: Connector jars of the session.
    """
    try:
        place = _place(jars)
        found = place.folder.glob(f"{place.stem}*.jsa")
        return next((file for file in found if file.stem == f"{place.stem}{_crc32(file)}"), None)
    except (OSError, RuntimeError):
        return None


def java_option(jars: Iterable[Path] = ()) -> str:
    """
    Return the options of Java that use the archive, quoted as Spark's launcher reads them; empty without an archive.

    Args:
        jars: Connector jars of the session.
    """
    archive = find_archive(jars)
    if archive is None:
        return ""
    return f"{shlex.quote(f'-XX:SharedArchiveFile={archive}')} -Xshare:auto {QUIET}"


def build_archive(jars: Sequence[Path] = ()) -> Path:
    """
    Write the archive if it is missing: run a local Spark, and let Java archive what it loaded. Takes about a minute.

    Args:
        jars: Connector jars of the session.

    Returns:
        Path of the archive. Archives of the same installation that fit no longer are deleted.

    Raises:
        SetupError: There is no Java or no Spark, the cache cannot be written, or Spark failed.
    """
    try:
        place = _place(jars)
    except (OSError, RuntimeError) as error:
        message = f"cannot archive Spark's classes: got {error}; set JAVA_HOME, run make setup"
        raise SetupError(message) from error
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        with exclusive(place.folder / f"{place.installation}.lock"):
            # Another process may have built it while this one waited.
            return find_archive(jars) or _build(place, jars)
    except OSError as error:
        message = (
            f"cannot archive Spark's classes: got {str(place.folder)!r}: {error.strerror}; "
            "make it writable, or set XDG_CACHE_HOME to another disk"
        )
        raise SetupError(message) from error


def _place(jars: Iterable[Path]) -> _Place:
    """Return where the archive belongs; OSError or RuntimeError where Java, Spark, a jar or the home is missing."""
    java, spark = _java_home(), _spark_jars()
    modules = java / "lib" / "modules"
    # Java compares the paths, the sizes and the times of the jars on its class path.
    shipped = [f"{_facts(jar)} {jar.stat().st_mtime_ns}" for jar in sorted(spark.glob("*.jar"))]
    installed = [str(java), str(spark)]
    inputs = [*installed, f"{_facts(modules)} {modules.stat().st_mtime_ns}", *shipped, *map(_facts, jars), COLLECTOR]
    return _Place(cache_folder() / "classes", _digest(installed), _digest(inputs))


def _build(place: _Place, jars: Sequence[Path]) -> Path:
    """Write the archive, and delete those of this installation that fit no longer. The lock must be held."""
    for left_over in place.folder.glob(f".{place.installation}-*"):  # from a build that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    sys.stderr.write(f"kmq: archiving Spark's classes in {place.folder}, once\n")
    with tempfile.TemporaryDirectory(dir=place.folder, prefix=f".{place.installation}-") as temporary:
        written = _run_spark(Path(temporary), jars)
        archive = place.folder / f"{place.stem}{_crc32(written)}.jsa"
        written.rename(archive)
    for other in place.folder.glob(f"{place.installation}-*.jsa"):
        if other != archive:
            other.unlink(missing_ok=True)
    return archive


def _run_spark(folder: Path, jars: Sequence[Path]) -> Path:
    """Run what loads the classes in a process of its own, whose JVM writes the archive as it ends; return the file."""
    archive = folder / "classes.jsa"
    command = [sys.executable, "-m", "kmq_spark.spark.class_loading", str(archive), *map(str, jars)]
    unwanted = {"PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYSPARK_SUBMIT_ARGS", "SPARK_REMOTE"}
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    try:
        done = subprocess.run(
            command, env=env, check=False, timeout=_BUILD_TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        message = f"cannot archive Spark's classes: got no end within {_BUILD_TIMEOUT_S} s; go on without the archive"
        raise SetupError(message) from error
    if done.returncode or not archive.is_file():
        last = "\n".join(done.stdout.splitlines()[-5:])
        message = (
            f"cannot archive Spark's classes: got exit code {done.returncode} of Spark; "
            f"go on without the archive; its last lines:\n{last}"
        )
        raise SetupError(message)
    return archive


def _crc32(file: Path) -> str:
    """Return the CRC-32 of a file in hex: a tenth of a second for an archive, and then Java finds it in memory."""
    with file.open("rb") as data:
        if not os.fstat(data.fileno()).st_size:
            return ""
        with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as contents:
            return f"{zlib.crc32(contents):08x}"


def _java_home() -> Path:
    """Return the home of the `java` that Spark's scripts start: that of `JAVA_HOME`, else that of `PATH`."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        message = "no Java in JAVA_HOME or PATH"
        raise FileNotFoundError(message)
    return Path(java).resolve(strict=True).parents[1]


def _spark_jars() -> Path:
    """Return the folder of the jars on the class path: of `SPARK_HOME`, else of the installed pyspark."""
    if home := os.environ.get("SPARK_HOME"):
        return Path(home, "jars").absolute()
    spec = importlib.util.find_spec("pyspark")  # does not import pyspark
    for location in (spec.submodule_search_locations or ()) if spec else ():
        return Path(location, "jars").absolute()
    message = "pyspark is not installed"
    raise FileNotFoundError(message)


def _facts(file: Path) -> str:
    """Return the name and the size of a file."""
    return f"{file.name} {file.stat().st_size}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def main(arguments: list[str]) -> int:
    """
    Run `build JAR …` or `option JAR …` from the command line.

    Returns:
        Exit code: 0 = success, 1 = failure (stderr says why), 2 = wrong arguments.
    """
    try:
        match arguments:
            case ["build", *jars]:
                build_archive([Path(jar) for jar in jars])
            case ["option", *jars]:
                sys.stdout.write(f"{java_option(map(Path, jars))}\n")
            case _:
                sys.stderr.write("usage: python -m kmq_spark.spark.class_archive build [JAR …] | option [JAR …]\n")
                return 2
    except SetupError as error:
        sys.stderr.write(f"kmq: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
