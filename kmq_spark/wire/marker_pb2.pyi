from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MessageID(_message.Message):
    __slots__ = ("partition", "offset")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    partition: int
    offset: int
    def __init__(self, partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class OffsetRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Rules(_message.Message):
    __slots__ = ("version", "max_deliveries", "backoff", "backoff_initial_ms", "backoff_max_ms", "backoff_jitter", "dead_letters_expired")
    class Backoff(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Rules.Backoff]
        CONSTANT: _ClassVar[Rules.Backoff]
        LINEAR: _ClassVar[Rules.Backoff]
        EXPONENTIAL: _ClassVar[Rules.Backoff]
    NONE: Rules.Backoff
    CONSTANT: Rules.Backoff
    LINEAR: Rules.Backoff
    EXPONENTIAL: Rules.Backoff
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_INITIAL_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MAX_MS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_JITTER_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    version: int
    max_deliveries: int
    backoff: Rules.Backoff
    backoff_initial_ms: int
    backoff_max_ms: int
    backoff_jitter: float
    dead_letters_expired: bool
    def __init__(self, version: _Optional[int] = ..., max_deliveries: _Optional[int] = ..., backoff: _Optional[_Union[Rules.Backoff, str]] = ..., backoff_initial_ms: _Optional[int] = ..., backoff_max_ms: _Optional[int] = ..., backoff_jitter: _Optional[float] = ..., dead_letters_expired: _Optional[bool] = ...) -> None: ...

class Marker(_message.Message):
    __slots__ = ("version", "type", "message_id", "redeliver_after_ms", "key", "value", "ranges", "delivery_count", "outcome", "reason", "consumer_id", "never_handed_out", "release", "due_at_ms", "rules", "term")
    class Version(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        V1: _ClassVar[Marker.Version]
    V1: Marker.Version
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        START: _ClassVar[Marker.Type]
        END: _ClassVar[Marker.Type]
        KEEPALIVE: _ClassVar[Marker.Type]
        TICK: _ClassVar[Marker.Type]
        RULES: _ClassVar[Marker.Type]
        TERM: _ClassVar[Marker.Type]
    START: Marker.Type
    END: Marker.Type
    KEEPALIVE: Marker.Type
    TICK: Marker.Type
    RULES: Marker.Type
    TERM: Marker.Type
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACKED: _ClassVar[Marker.Outcome]
        REJECTED: _ClassVar[Marker.Outcome]
        EXPIRED: _ClassVar[Marker.Outcome]
        REDELIVERED: _ClassVar[Marker.Outcome]
        DEAD_LETTERED: _ClassVar[Marker.Outcome]
    ACKED: Marker.Outcome
    REJECTED: Marker.Outcome
    EXPIRED: Marker.Outcome
    REDELIVERED: Marker.Outcome
    DEAD_LETTERED: Marker.Outcome
    class Release(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RENEWED: _ClassVar[Marker.Release]
        GIVEN_BACK: _ClassVar[Marker.Release]
        FAILED: _ClassVar[Marker.Release]
    RENEWED: Marker.Release
    GIVEN_BACK: Marker.Release
    FAILED: Marker.Release
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_ID_FIELD_NUMBER: _ClassVar[int]
    NEVER_HANDED_OUT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    version: Marker.Version
    type: Marker.Type
    message_id: MessageID
    redeliver_after_ms: int
    key: bytes
    value: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[OffsetRange]
    delivery_count: int
    outcome: Marker.Outcome
    reason: str
    consumer_id: str
    never_handed_out: bool
    release: Marker.Release
    due_at_ms: int
    rules: Rules
    term: int
    def __init__(self, version: _Optional[_Union[Marker.Version, str]] = ..., type: _Optional[_Union[Marker.Type, str]] = ..., message_id: _Optional[_Union[MessageID, _Mapping]] = ..., redeliver_after_ms: _Optional[int] = ..., key: _Optional[bytes] = ..., value: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[OffsetRange, _Mapping]]] = ..., delivery_count: _Optional[int] = ..., outcome: _Optional[_Union[Marker.Outcome, str]] = ..., reason: _Optional[str] = ..., consumer_id: _Optional[str] = ..., never_handed_out: _Optional[bool] = ..., release: _Optional[_Union[Marker.Release, str]] = ..., due_at_ms: _Optional[int] = ..., rules: _Optional[_Union[Rules, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...
