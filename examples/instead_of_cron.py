"""
Recurring jobs without cron: each run of a job sends the next one, to be delivered at its time.

    python instead_of_cron.py jobs localhost:9092 start report 3600   # once: every hour from now on
    python instead_of_cron.py jobs localhost:9092 work                # on as many machines as you like

The next run and the ack of this one are one transaction. So a job neither stops nor doubles, whatever dies; a run that
was interrupted is repeated by another worker. Runs that were missed, as in an outage, are made up for by one.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime

from kmq_spark import Message, QueueConsumer, QueueProducer


def start(queue: str, servers: str, job: str, every_s: float) -> None:
    with QueueProducer(queue, bootstrap_servers=servers) as producer:
        producer.send(json.dumps({"job": job, "every_s": every_s, "at": time.time()}))


def work(queue: str, servers: str) -> None:
    consumer = QueueConsumer(queue, bootstrap_servers=servers)

    def run(message: Message) -> None:
        run = json.loads(message.value or b"")
        print(run["job"], datetime.fromtimestamp(run["at"], UTC).isoformat(), flush=True)  # the work
        missed = max(0, time.time() - run["at"]) // run["every_s"]
        run["at"] += (missed + 1) * run["every_s"]
        with consumer.transaction() as tx:
            tx.send(queue, json.dumps(run), at=run["at"])
            tx.ack(message)

    consumer.run(run, concurrency=4)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [queue, servers, "start", job, every_s]:
            start(queue, servers, job, float(every_s))
        case [queue, servers, "work"]:
            work(queue, servers)
        case _:
            sys.exit(__doc__)
