"""
A process that copies the lines of a file into a queue, and continues where the last one stopped.

    python -m faults.copier '{"bootstrap_servers": …, "queue": …, "file": …, "rate": 2000}'

It prints one JSON object a line: `began` with generation and position, `copied` at the end of the file, `ended`, and
`fenced` where a newer copier has taken over.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from kmq_spark import FencedError, QueueProducer

FENCED_CODE = 4
"""Exit code of a copier that a newer one has replaced."""

COMMIT_TIMEOUT_S = 100.0
"""For the last commit: a broker that was killed takes longer than the default to come back on a busy machine."""


def _say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def main(text: str) -> int:
    """Copy; return the exit code."""
    options: dict[str, Any] = json.loads(text)
    file, rate, is_staying = options.pop("file"), options.pop("rate", 0), options.pop("is_staying", False)
    queue = options.pop("queue")
    try:
        with QueueProducer(queue, producer_id="copier", **options) as producer:
            position: Any = producer.position or {"line": 0, "offset": 0}
            _say("began", generation=producer.generation, sequence=producer.sequence, position=position)
            _copy(producer, file, position, rate)
            producer.commit(timeout=COMMIT_TIMEOUT_S)
            _say("copied", sequence=producer.sequence)
            while is_staying:
                time.sleep(0.1)
                producer.flush()
    except FencedError as error:
        _say("fenced", error=str(error))
        return FENCED_CODE
    _say("ended")
    return 0


def _copy(producer: QueueProducer, file: str, position: dict[str, int], rate: float) -> None:
    number, offset = position["line"], position["offset"]
    began_s, sent = time.monotonic(), 0
    with open(file, "rb") as lines:  # noqa: PTH123  # a program's first line of work, as users write it
        lines.seek(offset)
        for line in lines:
            number, offset, sent = number + 1, offset + len(line), sent + 1
            producer.send(line.rstrip(b"\n"), key=line[:8], position={"line": number, "offset": offset})
            if rate and sent % 50 == 0:
                time.sleep(max(0.0, began_s + sent / rate - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
