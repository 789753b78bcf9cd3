"""Add the locked jars to a bill of materials of the Python packages: `python requirements/sbom_jars.py FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kmq_spark.local.jars import LockedJar, read_lock


def component(jar: LockedJar) -> dict[str, object]:
    """Return a jar as a CycloneDX component."""
    group, name, version = jar.coordinate.split(":")
    url = f"pkg:maven/{group}/{name}@{version}"
    hashes = [{"alg": "SHA-256", "content": jar.sha256}]
    return {
        "type": "library", "bom-ref": url, "group": group, "name": name, "version": version, "purl": url,
        "hashes": hashes,
    }  # fmt: skip


def add_jars(file: Path) -> None:
    """Add the jars of all sets to a CycloneDX file, each once."""
    bom = json.loads(file.read_text(encoding="utf-8"))
    jars = sorted({jar for jar_set in read_lock().values() for jar in jar_set})
    bom["components"] += map(component, jars)
    file.write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    add_jars(Path(sys.argv[1]))
