"""The lock files: they are installed without resolving, so nothing else notices a package that is missing there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_installed_package_has_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_bill_of_materials_has_licences_and_jars(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    file.write_text(json.dumps({"components": [{"name": "pandas"}, {"name": "of-another-platform"}]}))
    subprocess.run([sys.executable, str(ROOT / "requirements" / "sbom.py"), str(file)], check=True)
    packages, jars = {}, []
    for each in json.loads(file.read_text())["components"]:
        if each.get("purl", "").startswith("pkg:maven/"):
            jars.append(each["name"])
        else:
            packages[each["name"]] = each.get("licenses")
    assert packages == {"pandas": [{"license": {"name": "BSD License"}}], "of-another-platform": None}
    assert {"kafka-clients", "spark-sql-kafka-0-10_2.13"} <= set(jars)
