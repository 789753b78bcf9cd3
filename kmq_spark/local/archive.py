"""
Pack this package into a zip file for executors on which it is not installed: `spark-submit --py-files`.

Rule 1: the file name contains a digest of the contents, so changed sources give another file.
Rule 2: the same sources give the same bytes. The file is created with one rename, so it is always complete.

numpy, pandas, pyarrow and protobuf must be installed on the executors: a zip file cannot provide their compiled
parts.
`python -m kmq_spark.local.archive` writes the file if needed and prints its path.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from kmq_spark.errors import SetupError
from kmq_spark.local.jars import cache_directory

PACKAGE = Path(__file__).parents[1]

_LEFT_OUT = frozenset({"__pycache__"})
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""A constant file time, so that the bytes are reproducible; the earliest time that a zip file can store."""


def package_archive() -> Path:
    """Return the zip file of this package; write it first if it is not in the cache."""
    contents = _contents()
    digest = hashlib.sha256(b"".join(_framed(name.encode()) + _framed(data) for name, data in contents.items()))
    target = cache_directory() / f"{PACKAGE.name}-{digest.hexdigest()[:12]}.zip"
    if not target.is_file():
        try:
            _write(contents, target)
        except OSError as error:
            message = (
                f"cannot write the package for the executors: got {str(target)!r}: {error.strerror}; "
                "make it writable, or set KMQ_JARS_DIR to another disk"
            )
            raise SetupError(message) from error
    return target


def _contents() -> dict[str, bytes]:
    """Return the contents of all files of the package by their names in the archive, sorted."""
    files = (file for file in PACKAGE.rglob("*") if file.is_file() and not _LEFT_OUT & set(file.parts))
    return {str(file.relative_to(PACKAGE.parent)): file.read_bytes() for file in sorted(files)}


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _write(contents: dict[str, bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in contents.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
        # Executors may run as another user.
        Path(temporary).chmod(0o644)
        Path(temporary).rename(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main() -> int:
    """Print the path; return the exit code: 0 = success, 1 = failure (one line on stderr)."""
    try:
        sys.stdout.write(f"{package_archive()}\n")
    except SetupError as error:
        sys.stderr.write(f"kmq: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
