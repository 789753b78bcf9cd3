"""
Batches as Arrow tables, for a model that is quick with many rows at once. Results and acks are one transaction.

    pip install kmq-spark pyarrow
    python arrow_inference.py measurements localhost:9092 scores

The value of a message is two float64, little-endian. What has another length is a dead letter.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from kmq_spark import Batch, QueueConsumer

ROW_BYTES = 16
WEIGHTS = np.array([0.5, -2.0])


def score(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stand for a model: one score for each row."""
    scores: NDArray[np.float64] = 1 / (1 + np.exp(-features @ WEIGHTS))
    return scores


def work(queue: str, servers: str, results: str) -> None:
    consumer = QueueConsumer(queue, bootstrap_servers=servers, max_in_flight=4_000)

    def infer(batch: Batch) -> None:
        table = batch.to_arrow()  # value, key, headers, partition, offset, appended_at, delivery_count
        is_row = np.array([len(value or b"") == ROW_BYTES for value in table["value"].to_pylist()])
        wrong = np.flatnonzero(~is_row).tolist()
        batch.reject(dict.fromkeys(wrong, f"not {ROW_BYTES} bytes"))
        rows = table.filter(is_row)
        features = np.frombuffer(b"".join(rows["value"].to_pylist()), "<f8").reshape(-1, len(WEIGHTS))
        with consumer.transaction() as tx:
            for key, one in zip(rows["key"].to_pylist(), score(features).tolist(), strict=True):
                tx.send(results, f"{one:.6f}", key=key)
            tx.ack(batch)
        print(f"scored {len(rows)} of {len(batch)}", flush=True)

    consumer.run(infer, batch=2_000, batch_wait=0.2, concurrency=1)


if __name__ == "__main__":
    work(*sys.argv[1:])
