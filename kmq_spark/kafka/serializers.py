"""
Values of messages as Python objects: JSON, pydantic models, and confluent-kafka's serializers as they are.

Rule 1: a value is read when a program asks for it. What cannot be read stays as it is: its bytes are in the message and
in its dead letter.

Source: confluent-kafka's `SerializingProducer` for the interface.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka.serialization import MessageField, SerializationContext

from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import TypeAdapter

CONTENT_TYPE = "content-type"
"""Header with the type of the content; the name is that of HTTP, and of CloudEvents over Kafka."""

_JSON = "application/json"


class Serializer(Protocol):
    """What turns objects into bytes: a function, or one of confluent-kafka's serializers."""

    def __call__(self, value: Any, context: SerializationContext, /) -> bytes | None:  # noqa: ANN401  # any object
        """Return the bytes of an object. *context* has topic, field and headers, to which it may append."""
        ...


class Deserializer(Protocol):
    """What turns bytes into objects: a function, or one of confluent-kafka's deserializers."""

    def __call__(self, value: bytes | None, context: SerializationContext, /) -> Any:  # noqa: ANN401  # any object
        """Return the object of these bytes, or raise. *context* has topic, field and headers."""
        ...


class JsonSerializer:
    """
    Values to JSON, for a producer: what JSON has, and pydantic models.

    The message gets the header `content-type: application/json`.
    """

    content_type = _JSON

    def __call__(self, value: Any, _context: SerializationContext, /) -> bytes:  # noqa: ANN401  # any object
        """Return an object as JSON."""
        if hasattr(value, "model_dump_json"):
            return str(value.model_dump_json()).encode()
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class JsonDeserializer:
    """Values from JSON, for a consumer. A message whose `content-type` says otherwise cannot be read."""

    def __init__(self, model: Any = None) -> None:  # noqa: ANN401  # a type
        """
        Keep the type of the values.

        Args:
            model: Type to check and return: a pydantic model, a dataclass, `list[int]`, whatever pydantic knows. By
                default what `json.loads` returns.
        """
        self._adapter: TypeAdapter[Any] | None = None
        if model is not None:
            from pydantic import TypeAdapter as Adapter  # noqa: PLC0415  # its import takes longer than ours

            self._adapter = Adapter(model)

    def __call__(self, value: bytes | None, context: SerializationContext, /) -> Any:  # noqa: ANN401  # any object
        """Return the object in a value."""
        if value is None:
            raise ValueError("the message has no value")
        found: Any = dict(context.headers or ()).get(CONTENT_TYPE) or _JSON.encode()
        content_type = found.decode("latin-1")
        if content_type.partition(";")[0].strip().lower() != _JSON:
            raise ValueError(f"content-type is {content_type!r}; expected {_JSON}")
        return json.loads(value) if self._adapter is None else self._adapter.validate_json(value)


def serialized(
    serializer: Serializer, topic: str, value: object, headers: Iterable[tuple[str, Any]]
) -> tuple[bytes | None, list[tuple[str, Any]]]:
    """Return the bytes of a value, and the headers with its content type and what the serializer has added."""
    pairs = list(headers)
    try:
        encoded = serializer(value, SerializationContext(topic, MessageField.VALUE, pairs))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())  # of pydantic it has many lines
        message = f"value cannot be written: got {type(value).__name__} ({why}); nothing was sent"
        raise ConfigError(message) from error
    if not isinstance(encoded, bytes | None):
        message = f"serializer returned the wrong type: got {type(encoded).__name__}; expected bytes"
        raise ConfigError(message)
    content_type = getattr(serializer, "content_type", "")
    if content_type and all(name != CONTENT_TYPE for name, _ in pairs):
        pairs.append((CONTENT_TYPE, content_type.encode()))
    return encoded, pairs
