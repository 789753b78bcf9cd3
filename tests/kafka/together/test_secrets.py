"""Passwords are nowhere but in their files: neither in logs and errors nor in what Spark shows and keeps."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from pathlib import Path
from secrets import token_hex
from urllib.request import urlopen

import pytest

from faults.processes import processes_of
from kmq_spark.client_properties import read_client_properties
from kmq_spark.local.probe import free_port
from tests.kafka.conftest import wait_until
from tests.kafka.secured import SecuredBroker
from tests.limits import COMES_S, ENDS_S

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
CANARY = f"canary-{token_hex(8)}-"
QUEUE = "orders"
PARTS = ("producer", "consumer", "tracker", "viewer")
LOUD = ("--log-format", "json", "--log-level", "DEBUG")


def page(address: str) -> str:
    """Return a page of an HTTP server."""
    with urlopen(f"http://127.0.0.1:{address}", timeout=COMES_S) as answer:
        return str(answer.read().decode())


def said(secured: SecuredBroker, part: str, *words: str, given: str | None = None) -> str:
    """Return all that a command writes."""
    return secured.kmq(part, *LOUD, *words, given=given).output


def shown_by_spark(ui: int) -> str:
    """Return what Spark's pages and its REST interface say about the settings and the queries."""
    (application,) = json.loads(page(f"{ui}/api/v1/applications"))
    rest = f"{ui}/api/v1/applications/{application['id']}"
    addresses = (f"{rest}/environment", f"{rest}/sql?details=true", f"{ui}/environment/", f"{ui}/StreamingQuery/")
    return "\n".join(map(page, addresses))


def test_no_password_is_in_what_the_parts_write_and_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each place is searched for what must be there too, so that an empty one does not pass."""
    caplog.set_level(logging.DEBUG)
    ui, metrics = free_port(), free_port()
    kept = {name: tmp_path / name for name in ("events", "checkpoint")}
    kept["events"].mkdir()
    with SecuredBroker.with_queue(tmp_path, QUEUE, *PARTS) as secured:
        file = secured.properties
        secrets = {read_client_properties(file(part))["extra"]["sasl.password"] for part in PARTS}
        wrong = file("creator")
        wrong.write_text(wrong.read_text().replace('password="', 'password="' + CANARY))
        secrets.add(CANARY)
        monkeypatch.setenv("KMQ_KAFKA__TIMEOUT", "3")
        found = {
            "send": said(secured, "producer", "send", QUEUE, given=f"one of the {QUEUE}"),
            "receive": said(secured, "consumer", "receive", QUEUE, "-n", "1"),
            "wrong password": said(secured, "creator", "queue", "describe", QUEUE),
        }
        monkeypatch.undo()
        events = {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false", "spark.ui.port": str(ui)}
        events["spark.eventLog.dir"] = kept["events"].as_uri()
        log = tmp_path / "tracker.log"
        with log.open("wb") as output:
            tracker = subprocess.Popen(
                [
                    str(ROOT / "spark-submit.sh"), "--master", "local[2]",
                    *(word for name, value in events.items() for word in ("--conf", f"{name}={value}")),
                    "jobs/redelivery_tracker.py", QUEUE, "--events", *LOUD, "--metrics-port", str(metrics),
                    "--checkpoint-dir", str(kept["checkpoint"]), "--command-config", str(file("tracker")),
                ],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "KMQ_SPARK_UI": "true"},
                start_new_session=True,
            )  # fmt: skip
        try:
            assert wait_until(lambda: '"ready"' in log.read_text() or tracker.poll() is not None)
            assert tracker.poll() is None, log.read_text()
            found |= {
                "doctor": said(secured, "viewer", "doctor", QUEUE),
                "metrics": page(f"{metrics}/metrics"),
                "Spark's pages": shown_by_spark(ui),
                "processes": "\n".join(each.command for each in processes_of(tracker.pid)),
            }
        finally:
            tracker.terminate()
            tracker.wait(ENDS_S)
        for name, folder in kept.items():
            files = [each for each in folder.rglob("*") if each.is_file()]
            found[name] = "\n".join(each.read_bytes().decode(errors="replace") for each in files)
        found |= {"tracker": log.read_text(), "log records": caplog.text}
    assert {name for name, text in found.items() if any(secret in text for secret in secrets)} == set()
    assert {name for name, text in found.items() if QUEUE not in text} == {"wrong password"}
    assert "invalid credentials" in found["wrong password"]
