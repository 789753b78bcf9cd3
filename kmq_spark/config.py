"""
Define the settings, their bounds and their sources.

Rule 1: only `jobs/` and `cli/` read settings; they pass frozen values to the other modules, which do not read the
environment.
Rule 2: precedence: flags > environment (`KMQ_<SECTION>__<KEY>`) > file (TOML) > default.
Rule 3: an unknown key is an error with a suggestion, never ignored.
Rule 4: a value that may be a secret never appears in a text, an error or a representation.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from kmq_spark.client_properties import check_safe
from kmq_spark.core.names import QUEUE_NAME, SUBSCRIPTION_NAME
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

TRACKED_NAME_PATTERN = rf"^{QUEUE_NAME}(@{SUBSCRIPTION_NAME})?$"
"""`queue`, or `queue@subscription` for a group of the queue; each group has its own tracker."""

ENV_PREFIX, ENV_DELIMITER = "KMQ_", "__"

_FILE_VALUES = "_file_values"
"""Argument name that passes the file's values to `settings_customise_sources`; no section may have this name."""

TrackedName = Annotated[str, Field(pattern=TRACKED_NAME_PATTERN)]


class Reach(TypedDict):
    """The connection arguments of all functions that call a broker: address, timeout, client settings with secrets."""

    bootstrap_servers: str
    timeout: float
    extra: dict[str, str]


class _Section(BaseModel):
    """One table of the file: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)


class KafkaSettings(_Section):
    """`[kafka]`: the connection to the broker."""

    bootstrap_servers: str = Field(default="localhost:9092", min_length=1)
    """Comma-separated `host:port`. Kafka key: `bootstrap.servers`."""

    extra: dict[str, SecretStr] = Field(default_factory=dict)
    """librdkafka keys passed through as they are (`security.protocol`, `sasl.*`, `ssl.*`); printed as `***`."""

    spark_extra: dict[str, SecretStr] = Field(default_factory=dict)
    """Java client keys for Spark's Kafka source, without the `kafka.` prefix (`sasl.jaas.config`, …)."""

    timeout: float = Field(default=15.0, ge=1.0, le=300.0)
    """Longest wait for an answer of the broker, seconds; raise it on slow networks."""

    def reach(self) -> Reach:
        """Return the connection arguments for a client; they contain secrets in plain text."""
        return Reach(bootstrap_servers=self.bootstrap_servers, timeout=self.timeout, extra=plain(self.extra))


class TrackerSettings(_Section):
    """`[tracker]`: the redelivery tracker."""

    queues: tuple[TrackedName, ...] = ()
    """Queues of this application, or groups as `queue@subscription`, a streaming query each; flags may name others."""

    checkpoint_dir: str = "checkpoints"
    """Where Spark keeps offsets and state, a folder per queue: a local path, or one of the cluster's file systems."""

    trigger: Literal["processing-time", "available-now"] = "processing-time"
    """`processing-time` runs until stopped; `available-now` handles what is there and ends."""

    commit_interval: float = Field(default=5.0, ge=0.1, le=5.0)
    """Seconds between two commits of the group's offsets while nothing is sent: how old the lag of Kafka's tools is."""

    state_partitions: int = Field(default=2, ge=1, le=1_000)
    """State partitions (`spark.sql.shuffle.partitions`); pinned by the first run of a checkpoint."""

    max_markers_per_batch: int = Field(default=200_000, ge=1, le=100_000_000)
    """Bound on one batch after an outage. Spark key: `maxOffsetsPerTrigger`."""

    max_transaction_messages: int = Field(default=30_000, ge=1, le=1_000_000)
    """Messages sent again in one Kafka transaction; a batch with more is cut into several."""

    fail_on_removed_markers: bool = True
    """Whether markers that retention removed unread stop the tracker; set false for one run to continue."""

    restart_limit: int = Field(default=20, ge=0, le=1_000_000)
    """How many times in a row a failed query is started again before the process ends with an error."""

    fleet: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,190}$")
    """Fleet of processes that share the queues and stand by for each other; empty: this process tracks them alone."""

    fleet_member: str = Field(default="", max_length=255)
    """Name of this process in its fleet, no two at a time; empty for a random one."""

    fleet_heartbeat: float = Field(default=2.0, ge=0.1, le=60.0)
    """T of a new fleet, seconds: after two of them without a heartbeat the others take the queues of a process over."""

    coordination_topic: str = Field(default="kmq.coordination", pattern=r"^[A-Za-z0-9._-]{1,249}$")
    """Topic through which the processes of a fleet coordinate; it is created where it does not exist."""


class WorkerSettings(_Section):
    """`[worker]`: `kmq worker`, which runs a handler."""

    concurrency: int = Field(default=8, ge=1, le=10_000)
    """Handlers that run at once: in threads, or a coroutine function in one event loop."""

    processes: int | None = Field(default=None, ge=1, le=1_000)
    """Handler processes, each with one message or batch at a time, in place of `concurrency`; by default none."""

    batch: int | None = Field(default=None, ge=1, le=1_000_000)
    """Maximum number of messages of a batch; by default the handler is called with single messages."""

    lease: float | None = Field(default=None, ge=1.0, le=43_200.0)
    """Seconds of a lease; by default what the rules of the queue say, else 30."""

    max_lease: float = Field(default=43_200.0, ge=1.0, le=43_200.0)
    """Seconds after which a handler that hangs loses its message, and its process is killed; at least `lease`."""

    drain_timeout: float = Field(default=20.0, ge=0.0, le=43_200.0)
    """Seconds that a stop waits for running handlers; shorter than the supervisor's patience (Kubernetes: 30)."""

    health_port: int = Field(default=0, ge=0, le=65_535)
    """Where the worker serves `/health`, at the address `metrics.host`; 0 = it does not."""


class LedgerSettings(_Section):
    """`[ledger]`: the ledger, the history of all messages in Delta tables."""

    dir: str = "ledger"
    """Folder of the tables: a local path, or one of the cluster's file systems. Not used where `catalog` is set."""

    catalog: str = ""
    """`catalog.schema` of the tables, which must exist; empty: the tables lie in `dir`."""

    checkpoint_dir: str = ""
    """Where Spark keeps how far it has read; empty: `_checkpoints` in `dir`. Needed with `catalog`."""

    interval: float = Field(default=10.0, ge=0.0, le=3_600.0)
    """Shortest time between two batches of a query, seconds: the age of the ledger. Each batch is a commit."""

    max_records_per_batch: int = Field(default=200_000, ge=1, le=100_000_000)
    """Bound on one batch of a query. Spark key: `maxOffsetsPerTrigger`."""

    keep_days: int = Field(default=30, ge=0, le=36_500)
    """Whole days that `kmq ledger maintain` leaves in the tables, today not counted; 0 = all."""

    fail_on_removed: bool = True
    """Whether records that retention removed unread stop the ledger; set false for one run to continue."""


class MetricsSettings(_Section):
    """`[metrics]`: Prometheus metrics of the tracker, or of `kmq worker`."""

    port: int = Field(default=0, ge=0, le=65_535)
    """Where it serves `/metrics`; 0 = it does not."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; loopback by default, because the page shows the names of queues without authentication."""


class Settings(BaseSettings):
    """
    All settings.

    Raises:
        ConfigError: Raised by `load_settings`, never by this class directly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # type: ignore[assignment]  # no SettingsConfigDict key needed

    kafka: KafkaSettings = KafkaSettings()
    tracker: TrackerSettings = TrackerSettings()
    worker: WorkerSettings = WorkerSettings()
    ledger: LedgerSettings = LedgerSettings()
    metrics: MetricsSettings = MetricsSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence: flags (constructor arguments), environment, file; no dotenv."""
        del env_settings, dotenv_settings, file_secret_settings
        flags = dict(init_settings())
        file_values = flags.pop(_FILE_VALUES, {})
        return (
            InitSettingsSource(settings_cls, flags),
            EnvSettingsSource(settings_cls, env_prefix=ENV_PREFIX, env_nested_delimiter=ENV_DELIMITER),
            InitSettingsSource(settings_cls, file_values),
        )


def load_settings(file: Path | None = None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """
    Read the settings from all sources and check them.

    Args:
        file: TOML file; None if there is none.
        flags: Values by section and key. They take precedence over all other sources; None values are ignored.

    Raises:
        ConfigError: The file is missing or is not TOML, a key is unknown, a value is out of bounds, or a setting of
            `[kafka.spark_extra]` loads classes.
    """
    source = " or ".join(filter(None, ("the flags", "the environment", str(file or ""))))
    _check_environment()
    given = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in (flags or {}).items()
    }
    arguments: dict[str, Any] = {section: values for section, values in given.items() if values}
    arguments[_FILE_VALUES] = _read(file)
    try:
        settings = Settings(**arguments)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], source, Settings)) from error
    except SettingsError as error:
        # The cause contains the value, which may be a password.
        message = f"cannot read the {ENV_PREFIX}* variables: {error}, tables and lists are JSON; correct the variable"
        raise ConfigError(message) from None
    check_safe(plain(settings.kafka.spark_extra))
    return settings


def _check_environment() -> None:
    """Reject variables of unknown sections; unknown keys of known sections are found by the validation."""
    for name in os.environ:
        section, delimiter, _ = name.upper().removeprefix(ENV_PREFIX).partition(ENV_DELIMITER)
        if name.upper().startswith(ENV_PREFIX) and delimiter and section.lower() not in Settings.model_fields:
            allowed = sorted(Settings.model_fields)
            close = difflib.get_close_matches(section.lower(), allowed, n=1)
            hint = f"did you mean {ENV_PREFIX}{close[0].upper()}{ENV_DELIMITER}…?" if close else "remove it"
            message = f"unknown setting: got {name!r} in the environment, allowed are {', '.join(allowed)}; {hint}"
            raise ConfigError(message)


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot read the settings file: got {str(file)!r}: {error.strerror}; give an existing TOML file"
        raise ConfigError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"the settings file is not valid TOML: got {str(file)!r}: {error}; see conf/local.toml for the form"
        raise ConfigError(message) from error


def _explain(error: ErrorDetails, source: str, model: type[BaseModel]) -> str:
    """Convert pydantic's first error to the form *what is wrong: got value, what is allowed; what to do*."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    if error["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(model, path[:-1]))
        close = difflib.get_close_matches(path[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "remove it"
        return f"unknown setting: got {name!r} in {source}, allowed are {', '.join(allowed)}; {hint}"
    wanted = error["msg"][0].lower() + error["msg"][1:]
    shown = repr(error["input"]) if path[0] != "kafka" or name in _OPEN_KAFKA_SETTINGS else "***"
    return f"setting {name} is not allowed: got {shown}, {wanted}; correct it in {source}"


_OPEN_KAFKA_SETTINGS = frozenset({"kafka.bootstrap_servers", "kafka.timeout"})


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def plain(extra: Mapping[str, SecretStr]) -> dict[str, str]:
    """Return pass-through settings with secrets in plain text; only for the client that needs them."""
    return {key: value.get_secret_value() for key, value in extra.items()}
