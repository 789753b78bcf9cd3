from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HeldPosition(_message.Message):
    __slots__ = ("resource", "epoch", "position")
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    resource: str
    epoch: int
    position: int
    def __init__(self, resource: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("task", "client_id")
    TASK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    task: str
    client_id: str
    def __init__(self, task: _Optional[str] = ..., client_id: _Optional[str] = ...) -> None: ...

class SnapshotPart(_message.Message):
    __slots__ = ("as_of", "part", "parts", "data")
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    as_of: int
    part: int
    parts: int
    data: bytes
    def __init__(self, as_of: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Coordination(_message.Message):
    __slots__ = ("version", "type", "client_id", "instance", "sequence", "metadata", "heartbeat_ms", "fast_reclaim", "positions", "resource", "epoch", "position", "duration_ms", "payload", "member", "generation", "assignments", "snapshot", "topic_id")
    class Version(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        V1: _ClassVar[Coordination.Version]
    V1: Coordination.Version
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Coordination.Type]
        JOIN: _ClassVar[Coordination.Type]
        HEARTBEAT: _ClassVar[Coordination.Type]
        LEAVE: _ClassVar[Coordination.Type]
        CLAIM: _ClassVar[Coordination.Type]
        RELEASE: _ClassVar[Coordination.Type]
        CLAIM_MESSAGES: _ClassVar[Coordination.Type]
        PAUSE_GROUP: _ClassVar[Coordination.Type]
        RESUME_GROUP: _ClassVar[Coordination.Type]
        SET_POSITION: _ClassVar[Coordination.Type]
        ADD_TASK: _ClassVar[Coordination.Type]
        REMOVE_TASK: _ClassVar[Coordination.Type]
        DRAIN: _ClassVar[Coordination.Type]
        ASSIGN: _ClassVar[Coordination.Type]
        SNAPSHOT: _ClassVar[Coordination.Type]
    NONE: Coordination.Type
    JOIN: Coordination.Type
    HEARTBEAT: Coordination.Type
    LEAVE: Coordination.Type
    CLAIM: Coordination.Type
    RELEASE: Coordination.Type
    CLAIM_MESSAGES: Coordination.Type
    PAUSE_GROUP: Coordination.Type
    RESUME_GROUP: Coordination.Type
    SET_POSITION: Coordination.Type
    ADD_TASK: Coordination.Type
    REMOVE_TASK: Coordination.Type
    DRAIN: Coordination.Type
    ASSIGN: Coordination.Type
    SNAPSHOT: Coordination.Type
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    FAST_RECLAIM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    version: Coordination.Version
    type: Coordination.Type
    client_id: str
    instance: str
    sequence: int
    metadata: bytes
    heartbeat_ms: int
    fast_reclaim: bool
    positions: _containers.RepeatedCompositeFieldContainer[HeldPosition]
    resource: str
    epoch: int
    position: int
    duration_ms: int
    payload: bytes
    member: str
    generation: int
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    snapshot: SnapshotPart
    topic_id: str
    def __init__(self, version: _Optional[_Union[Coordination.Version, str]] = ..., type: _Optional[_Union[Coordination.Type, str]] = ..., client_id: _Optional[str] = ..., instance: _Optional[str] = ..., sequence: _Optional[int] = ..., metadata: _Optional[bytes] = ..., heartbeat_ms: _Optional[int] = ..., fast_reclaim: _Optional[bool] = ..., positions: _Optional[_Iterable[_Union[HeldPosition, _Mapping]]] = ..., resource: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., duration_ms: _Optional[int] = ..., payload: _Optional[bytes] = ..., member: _Optional[str] = ..., generation: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotPart, _Mapping]] = ..., topic_id: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("client_id", "instance", "joined_at", "metadata", "is_draining", "seen_ms", "renewed_ms")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    JOINED_AT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    RENEWED_MS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    instance: str
    joined_at: int
    metadata: bytes
    is_draining: bool
    seen_ms: int
    renewed_ms: int
    def __init__(self, client_id: _Optional[str] = ..., instance: _Optional[str] = ..., joined_at: _Optional[int] = ..., metadata: _Optional[bytes] = ..., is_draining: _Optional[bool] = ..., seen_ms: _Optional[int] = ..., renewed_ms: _Optional[int] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("name", "holder", "epoch", "position", "claimed_to", "topic_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TO_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    holder: str
    epoch: int
    position: int
    claimed_to: int
    topic_id: str
    def __init__(self, name: _Optional[str] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., claimed_to: _Optional[int] = ..., topic_id: _Optional[str] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("name", "payload", "client_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    payload: bytes
    client_id: str
    def __init__(self, name: _Optional[str] = ..., payload: _Optional[bytes] = ..., client_id: _Optional[str] = ...) -> None: ...

class World(_message.Message):
    __slots__ = ("version", "next_offset", "clock_ms", "newest_append_ms", "last_append_ms", "heartbeat_ms", "generation", "paused_until_ms", "snapshot_at", "members", "resources", "tasks")
    class Version(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        V1: _ClassVar[World.Version]
    V1: World.Version
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_APPEND_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_APPEND_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    version: World.Version
    next_offset: int
    clock_ms: int
    newest_append_ms: int
    last_append_ms: int
    heartbeat_ms: int
    generation: int
    paused_until_ms: int
    snapshot_at: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    resources: _containers.RepeatedCompositeFieldContainer[Resource]
    tasks: _containers.RepeatedCompositeFieldContainer[Task]
    def __init__(self, version: _Optional[_Union[World.Version, str]] = ..., next_offset: _Optional[int] = ..., clock_ms: _Optional[int] = ..., newest_append_ms: _Optional[int] = ..., last_append_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., generation: _Optional[int] = ..., paused_until_ms: _Optional[int] = ..., snapshot_at: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., resources: _Optional[_Iterable[_Union[Resource, _Mapping]]] = ..., tasks: _Optional[_Iterable[_Union[Task, _Mapping]]] = ...) -> None: ...
