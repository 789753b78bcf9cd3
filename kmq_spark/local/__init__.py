"""What a laptop needs to run everything by itself: a Java, the jars, a Kafka broker. Not for production."""

from __future__ import annotations
