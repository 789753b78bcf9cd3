"""
A worker process of the demo: an ordinary consumer, without code for being killed.

    python -m kmq_spark.demo.worker RESULTS_FILE BOOTSTRAP_SERVER QUEUE LEASE_MS GROUP_PROTOCOL

Each message is a `.py` file of the standard library. The direct count, without a queue, calls the same function.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kmq_spark.consumer.consumer import QueueConsumer

if TYPE_CHECKING:
    from kmq_spark.consumer.message import Message

MAX_IN_FLIGHT = 40
"""A small number, so that killing a worker delays only a few files."""

THREADS = 2

NICENESS = 10

LARGEST_FILE_BYTES = 900_000
"""Larger files do not fit into a message of 1 MiB with key and headers; the standard library has none today."""

BROKEN_FILES = {
    "kmq-demo/unclosed.py": b"def unclosed(:\n",
    "kmq-demo/indented.py": b"x = 1\n    y = 2\n",
    "kmq-demo/null_byte.py": b"x = '\x00'\n",
}
"""Files that cannot be parsed, for installations without such files (if the library's tests are a separate package)."""


def standard_library() -> dict[str, bytes]:
    """Return the files of this interpreter's standard library, by path relative to its folder, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    contents = {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}
    return {path: content for path, content in contents.items() if len(content) <= LARGEST_FILE_BYTES}


def count_definitions(content: bytes) -> int:
    """Count the functions and classes of a source file."""
    with warnings.catch_warnings():
        # The library's tests contain invalid escapes and similar code on purpose.
        warnings.simplefilter("ignore")
        tree = ast.parse(content)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sum(isinstance(node, kinds) for node in ast.walk(tree))


def count_directly(files: dict[str, bytes]) -> tuple[dict[str, int], set[str]]:
    """Count every file in this process, without a queue; return the counts and the files that cannot be parsed."""
    counts: dict[str, int] = {}
    broken: set[str] = set()
    for path, content in files.items():
        try:
            counts[path] = count_definitions(content)
        except (SyntaxError, ValueError, RecursionError):
            broken.add(path)
    return counts, broken


def main(results_file: str, bootstrap_servers: str, queue: str, lease_ms: str, group_protocol: str) -> None:
    """Process messages until SIGTERM and write one result a line; an incomplete line has no line break."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    # In production workers run on other machines. Here they share the cores with broker and tracker: lower priority.
    os.nice(NICENESS)
    results = os.open(Path(results_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def handle(message: Message) -> None:
        path = (message.key or b"").decode()
        result: dict[str, object] = {"path": path, "delivery": message.delivery_count, "pid": os.getpid()}
        os.write(results, _line({**result, "event": "begun"}))
        try:
            count = count_definitions(message.value or b"")
        except (SyntaxError, ValueError, RecursionError) as error:
            message.reject(f"cannot be parsed: {type(error).__name__}: {error}")
            os.write(results, _line({**result, "event": "rejected"}))
        else:
            os.write(results, _line({**result, "event": "counted", "definitions": count}))

    consumer = QueueConsumer(
        queue,
        bootstrap_servers=bootstrap_servers,
        lease=int(lease_ms) / 1000,
        max_in_flight=MAX_IN_FLIGHT,
        extra={"group.protocol": group_protocol},
    )
    consumer.run(handle, concurrency=THREADS)


def _line(result: dict[str, object]) -> bytes:
    return json.dumps(result).encode() + b"\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
