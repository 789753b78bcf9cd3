"""
A worker that inserts batches of messages into a database, each message exactly once.

    python batches_to_sqlite.py orders localhost:9092 orders.db

A message may be delivered twice: a worker that dies between COMMIT and ack has done its work. The place of the first
copy, `message.origin`, is the same for each delivery. As the primary key, it makes the second INSERT do nothing.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

from kmq_spark import Batch, QueueConsumer


def store(database: str, batch: Batch) -> None:
    rows = [(message.origin.text, (message.value or b"").decode()) for message in batch]
    with closing(sqlite3.connect(database, timeout=20)) as connection, connection:  # commits, or rolls back
        inserted = connection.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?)", rows).rowcount
    print(f"{inserted} of {len(rows)} were new", flush=True)


def work(queue: str, servers: str, database: str) -> None:
    with closing(sqlite3.connect(database, timeout=20)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (origin TEXT PRIMARY KEY, value TEXT NOT NULL)")
    consumer = QueueConsumer(queue, bootstrap_servers=servers, lease=30)
    consumer.run(
        lambda batch: store(database, batch), batch=500
    )  # returning acknowledges the batch, raising releases it


if __name__ == "__main__":
    work(*sys.argv[1:])
