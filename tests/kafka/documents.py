"""
A reader who types what a document shows: its blocks in order, each as it stands, in a fresh folder.

Rule 1: every fence of a document names what it is: `sh`, `console`, `python`, `sql`, `toml`, `yaml` run or are read;
`text` is output or a drawing.
Rule 2: a block that cannot run here has `<!-- not run: reason -->` on the line before it, which a reader does not see.
Rule 3: ports are replaced by free ones, nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import yaml

from kmq_spark.local.probe import free_port
from tests.brokers import quick_java
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

ROOT = Path(__file__).parents[2]
LANGUAGES = {"sh", "console", "python", "sql", "toml", "yaml", "text", "properties"}
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)\n```$", re.DOTALL | re.MULTILINE
)
RUNS_ON = re.compile(
    r"kmq up|kmq tracker run(?!.*available-now)|spark-submit\.sh (?!.*available-now)|"
    r"kmq ledger run(?!.*--once)|kmq top(?!.*--once)"
)
"""Commands that run until they are stopped."""

ASK = "import sys; from kmq_spark import ledger; print(ledger.connect('ledger').execute(sys.argv[1]).fetchall())"
"""Runs a query on the ledger in the folder, by DuckDB."""

CHECK = re.compile(r"^(?:ok|warning|unhealthy) +(\w+(?: \w+)?)  ", re.MULTILINE)
"""A line of `kmq doctor`: the check."""

CHECKS_WITH_A_FINDING_ONLY = {"workers", "ticks", "markers", "checkpoint"}

UNHEALTHY_IS_AN_ANSWER = re.compile(r"kmq (doctor|tracker status)")
"""Commands whose exit code 3 is an answer."""


class Block(NamedTuple):
    """A fenced block of a document."""

    line: int
    language: str
    text: str
    reason: str


def blocks_of(document: str) -> list[Block]:
    """Return the blocks of a document, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(text[: found.start()].count("\n") + 1, found["language"], found["text"], found["reason"] or "")
        for found in FENCE.finditer(text)
    ]


class Running(NamedTuple):
    """A command that runs on, and where it writes."""

    command: str
    process: subprocess.Popen[bytes]
    log: Path


class Reader:
    """A reader of the documents, who runs the commands in them."""

    def __init__(self, folder: Path, port: int, spare_port: int) -> None:
        self.folder = folder
        self.printed: dict[str, str] = {}
        """What each block of Python wrote to stdout, by the name of its file."""
        self._ports = {"9092": str(port), "9333": str(spare_port)}
        self._running: list[Running] = []
        self._number = 0
        for name in ("jobs", "conf", "spark-submit.sh", "kmq_spark"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "KMQ_KAFKA__BOOTSTRAP_SERVERS": f"localhost:{port}",
        }

    def read(
        self,
        document: str,
        until: dict[str, Callable[[str], bool]] | None = None,
        kills: Collection[str] = (),
    ) -> None:
        """Type the blocks of a document."""
        for block in blocks_of(document):
            if block.reason:
                continue
            try:
                self._type(block, until or {}, kills)
            except AssertionError as error:
                raise AssertionError(f"{document}:{block.line}: {error}") from error

    def stop(self) -> None:
        """End what runs on, the newest first."""
        while self._running:
            self._end(self._running[-1])

    def kill(self) -> None:
        """End what a failed test left."""
        for each in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)

    def run(self, command: str) -> str:
        """Type one command; return what it wrote to stdout."""
        self._make_way(command)
        command = self._with_ports(command)
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.folder, env=self._environment, capture_output=True, text=True,
            check=False, timeout=ENDS_S,
        )  # fmt: skip
        allowed = {0, 3} if UNHEALTHY_IS_AN_ANSWER.search(command) else {0}
        assert done.returncode in allowed, f"`{command}` ended with {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"`{command}`: {done.stderr}"
        return done.stdout

    def _type(self, block: Block, until: dict[str, Callable[[str], bool]], kills: Collection[str]) -> None:
        text = block.text
        if block.language == "sh":
            for command in _commands(text):
                self._start(command) if RUNS_ON.search(command) else self.run(command)
        elif block.language == "console":
            self._compare(text)
        elif block.language == "python":
            self._run_python(text, until, kills)
        elif block.language == "sql":
            self._run_sql(text)
        elif block.language == "toml":
            tomllib.loads(text)
        elif block.language == "yaml":
            yaml.safe_load(text)

    def _compare(self, text: str) -> None:
        """Run each `$` line; the heads of its table must be those that are shown."""
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            if command.startswith("echo $?"):
                continue
            printed = self.run(command).splitlines()
            head = next(iter(shown.splitlines()), "")
            if printed == ["no rows"]:
                continue
            if re.fullmatch(r"\s*[A-Z][A-Z /]+", head) or re.fullmatch(r"[a-z_]+(  +[a-z_0-9]+)+", head):
                assert printed, f"`{command}` printed nothing"
                assert set(head.split()) <= set(printed[0].split()), f"`{command}`: {printed[0]!r}, shown {head!r}"
            if command.startswith("kmq doctor"):
                done, named = set(CHECK.findall("\n".join(printed))), set(CHECK.findall(shown))
                # The page may show more: a queue without a tracker has no `fencing`.
                assert named >= done - CHECKS_WITH_A_FINDING_ONLY, f"`{command}` prints {done}, shown {named}"

    def _run_python(self, text: str, until: dict[str, Callable[[str], bool]], kills: Collection[str]) -> None:
        """Run a block as a file of its own."""
        self._number += 1
        name = f"block_{self._number}.py"
        (self.folder / name).write_text(self._with_ports(text), encoding="utf-8")
        for mark, is_complete in until.items():
            if mark in text:
                running = self._start(f"python {name}", is_complete)
                if mark in kills:
                    running.process.kill()
                    running.process.wait()
                    self._running.remove(running)
                else:
                    self._end(running)
                return
        self.printed[name] = self.run(f"python {name}")

    def _run_sql(self, text: str) -> None:
        """Run a query on the ledger in the folder, by DuckDB."""
        found = self.run(f"python -c {shlex.quote(ASK)} {shlex.quote(text)}")
        assert found.strip() != "[]", f"no row: {text}"

    def _start(self, command: str, is_complete: Callable[[str], bool] | None = None) -> Running:
        """Start what runs on, and wait until it works."""
        self._make_way(command)
        self._number += 1
        log = self.folder / f"{self._number}.log"
        environment = {**self._environment, **(quick_java() if "kmq up" in command else {})}
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {self._with_ports(command)}"], cwd=self.folder, env=environment,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        running = Running(command, process, log)
        self._running.append(running)
        works = is_complete or (lambda written: self._works(command, written))
        until = time.monotonic() + COMES_S
        while not works(log.read_text(errors="replace")):
            assert process.poll() is None, f"`{command}` ended with {process.poll()}: {log.read_text(errors='replace')}"
            assert time.monotonic() < until, f"`{command}` did not begin to work: {log.read_text(errors='replace')}"
            time.sleep(0.1)
        return running

    def _make_way(self, command: str) -> None:
        """End what the command takes the place of: a newer tracker fences the older one, a ledger has one writer."""
        for kind in (r"kmq tracker (run|once)|redelivery_tracker\.py", r"kmq ledger (run|maintain)"):
            if re.search(kind, command):
                for older in [each for each in self._running if re.search(kind, each.command)]:
                    self._end(older)

    def _works(self, command: str, written: str) -> bool:
        if "kmq up" in command:
            return "broker ready" in written
        if "ledger" in command:
            # The second commit of each table is its first batch; no dead letters are no batch.
            return "is ready" in written and all(
                (self.folder / f"ledger/{name}/_delta_log/{1:020}.json").exists() for name in ("markers", "messages")
            )
        if "top" in command:
            return "READY" in written
        return re.search(r"is ready|decides from", written) is not None

    def _end(self, running: Running) -> None:
        self._running.remove(running)
        if running.process.poll() is None:
            os.kill(running.process.pid, signal.SIGINT if "top" in running.command else signal.SIGTERM)
        code = running.process.wait(ENDS_S)
        written = running.log.read_text(errors="replace")
        # spark-submit's own code for SIGTERM is 143.
        allowed = {0, 143} if "spark-submit" in running.command else {0}
        assert code in allowed, f"`{running.command}` ended with {code}: {written}"
        assert "Traceback" not in written, f"`{running.command}`: {written}"

    def _with_ports(self, text: str) -> str:
        for shown, free in self._ports.items():
            text = text.replace(shown, free)
        return text


def _commands(text: str) -> list[str]:
    """Return the commands of a block; one may go on in the next line."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[[int], Reader]]:
    """Make a user who types in a new folder."""
    readers: list[Reader] = []

    def make(port: int) -> Reader:
        folder = tmp_path / "fresh"
        folder.mkdir()
        readers.append(Reader(folder, port, free_port()))
        return readers[-1]

    yield make
    for reader in readers:
        reader.kill()
