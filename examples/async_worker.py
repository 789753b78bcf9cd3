"""
An asyncio worker that calls a slow HTTP service: up to 200 calls at once in one thread, and retries by type of error.

    pip install kmq-spark httpx
    python async_worker.py orders localhost:9092 http://localhost:8000/invoices

An order is acknowledged when the service has taken it. A service that is down or busy gets it again, later each time
(the backoff of the queue); an order that the service refuses is a dead letter with the reason. Ctrl+C stops it cleanly.
"""

from __future__ import annotations

import asyncio
import sys

import httpx

from kmq_spark import AsyncQueueConsumer, Message, Reject, Retry


async def work(queue: str, servers: str, service: str) -> None:
    async with (
        httpx.AsyncClient(timeout=20) as client,
        AsyncQueueConsumer(queue, bootstrap_servers=servers) as consumer,
    ):

        async def invoice(message: Message) -> None:
            # The same for each delivery of a message: the service knows what it has done already.
            headers = {"Idempotency-Key": message.origin.text}
            answer = await client.post(service, content=message.value or b"", headers=headers)
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                raise Retry("the service is busy", delay=float(answer.headers.get("Retry-After", 1)))
            if answer.is_client_error:
                raise Reject(f"refused with {answer.status_code}: {answer.text[:200]}")
            answer.raise_for_status()
            print("invoiced", message.origin.text, flush=True)

        await consumer.run(invoice, concurrency=200, retry={httpx.TransportError: 5, httpx.HTTPStatusError: 1})


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
