"""
A web service that enqueues: it answers when the message is durable, and a worker does the rest.

    pip install kmq-spark fastapi uvicorn
    QUEUE=orders BOOTSTRAP_SERVERS=localhost:9092 uvicorn web_service:app
    curl -d '{"customer": "anna", "what": "tea"}' -H 'Content-Type: application/json' localhost:8000/orders
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel

from kmq_spark import AsyncQueueProducer, KmqError


class Order(BaseModel):
    """What a customer posts."""

    customer: str
    what: str


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncQueueProducer(os.environ["QUEUE"], bootstrap_servers=os.environ["BOOTSTRAP_SERVERS"]) as producer:
        app.state.producer = producer
        yield


app = FastAPI(lifespan=connected)


@app.post("/orders", status_code=202)
async def take(order: Order, request: Request) -> dict[str, str]:
    producer: AsyncQueueProducer = request.app.state.producer
    try:
        sent = await producer.send(order.model_dump_json(), key=order.customer)
    except KmqError as error:
        raise HTTPException(503, "the order was not taken; try again") from error
    return {"id": sent.text}
