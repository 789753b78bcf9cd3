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
import io
import sys
import tempfile
import zipfile
from pathlib import Path

from kmq_spark.errors import SetupError
from kmq_spark.local.jars import cache_directory

PACKAGE = Path(__file__).parents[1]

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""A constant file time, so that the bytes are reproducible; the earliest time that a zip file can store."""


def package_archive() -> Path:
    """Return the zip file of this package; write it first if it is not in the cache."""
    data = _zipped()
    target = cache_directory() / f"{PACKAGE.name}-{hashlib.sha256(data).hexdigest()[:12]}.zip"
    if not target.is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.stem}-") as folder:
                file = Path(folder, target.name)
                file.write_bytes(data)
                file.chmod(0o644)  # executors may run as another user
                file.rename(target)
        except OSError as error:
            raise SetupError(
                f"cannot write the package for the executors: got {str(target)!r}: {error.strerror}; "
                "make it writable, or set KMQ_JARS_DIR to another disk"
            ) from error
    return target


def _zipped() -> bytes:
    """Return the bytes of the zip file with all files of the package."""
    files = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files):
            name = zipfile.ZipInfo(str(file.relative_to(PACKAGE.parent)), _EPOCH)
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


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
