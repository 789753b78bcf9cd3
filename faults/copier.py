"""
A process that copies the lines of a file into a queue, and continues where the last one stopped.

    python -m faults.copier '{"bootstrap_servers": …, "queue": …, "file": …, "rate": 2000}'

It prints events: `began`, `copied` at the end of the file, `ended`, and `fenced` where a newer copier has taken over.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from faults.events import EventFile
from kmq_spark import FencedError, ResumingProducer

FENCED_CODE = 4
"""Exit code of a copier that a newer one has replaced."""

COMMIT_EVERY_S = 0.02
"""Between two commits, where the options say nothing else."""


def main(text: str) -> int:
    """Copy; return the exit code."""
    options: dict[str, Any] = json.loads(text)
    file, rate, is_staying = options.pop("file"), options.pop("rate", 0), options.pop("is_staying", False)
    commit_every_s = options.pop("commit_every_s", COMMIT_EVERY_S)
    events, queue = EventFile.of_this_process(), options.pop("queue")
    try:
        with ResumingProducer(queue, "copier", **options) as producer:
            position: Any = producer.position or {"line": 0, "offset": 0}
            events.write("began", position=position)
            _copy(producer, file, position, rate, commit_every_s)
            events.write("copied")
            while is_staying:
                time.sleep(0.1)
                producer.commit(producer.position)
    except FencedError as error:
        events.write("fenced", error=str(error))
        return FENCED_CODE
    events.write("ended")
    return 0


def _copy(producer: ResumingProducer, file: str, position: dict[str, int], rate: float, commit_every_s: float) -> None:
    number, offset = position["line"], position["offset"]
    began_s, sent = time.monotonic(), 0
    commit_at_s = began_s + commit_every_s
    with open(file, "rb") as lines:  # noqa: PTH123  # a program's first line of work, as users write it
        lines.seek(offset)
        for line in lines:
            number, offset, sent = number + 1, offset + len(line), sent + 1
            producer.send(line.rstrip(b"\n"), key=line[:8])
            if time.monotonic() >= commit_at_s:
                producer.commit({"line": number, "offset": offset})
                commit_at_s = time.monotonic() + commit_every_s
            if rate and sent % 50 == 0:
                time.sleep(max(0.0, began_s + sent / rate - time.monotonic()))
    producer.commit({"line": number, "offset": offset})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
