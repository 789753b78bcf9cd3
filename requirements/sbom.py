"""
Complete a bill of materials of the Python packages: their licences, and the locked jars. `sbom.py FILE`.

`cyclonedx-py environment` knows licences too, and lists what only tests need.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, metadata
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


def licence_of(name: str) -> str:
    """Return the licence that a package names; empty for one that is not installed here (of another platform)."""
    try:
        package = metadata(name)
    except PackageNotFoundError:
        return ""
    named = [each.rpartition(" :: ")[2] for each in package.get_all("Classifier", []) if each.startswith("License ::")]
    named = package.get_all("License-Expression") or named or package.get_all("License", [""])
    return ", ".join(named).partition("\n")[0]


def complete(file: Path) -> None:
    """Add to a CycloneDX file the licences of its packages, and the jars of all sets, each once."""
    bom = json.loads(file.read_text(encoding="utf-8"))
    for package in bom["components"]:
        if licence := licence_of(package["name"]):
            package["licenses"] = [{"license": {"name": licence}}]
    jars = sorted({jar for jar_set in read_lock().values() for jar in jar_set})
    bom["components"] += map(component, jars)
    file.write_text(json.dumps(bom, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    complete(Path(sys.argv[1]))
