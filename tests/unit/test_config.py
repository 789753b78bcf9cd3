"""Settings: where a value comes from, what is refused and with which error, and that secrets stay secret."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import annotated_types
import pytest

from kmq_spark.config import Settings, load_settings, plain
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

SECRET = "canary-7f3a"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return where a settings file may be written."""
    return tmp_path / "kmq.toml"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the settings of the user who runs the tests."""
    import os  # noqa: PLC0415  # the only place that looks

    for name in os.environ:
        if name.upper().startswith("KMQ_") and "__" in name:
            monkeypatch.delenv(name)


def refusal(file: Path | None = None, flags: dict[str, dict[str, Any]] | None = None) -> str:
    """Return the one line with which settings are refused."""
    with pytest.raises(ConfigError) as raised:
        load_settings(file, flags)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_flag_goes_before_environment_before_file_before_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interval(flag: float | None = None) -> float:
        return load_settings(file, {"tracker": {"commit_interval": flag}}).tracker.commit_interval

    file.write_text("")
    assert interval() == 5
    file.write_text("[tracker]\ncommit_interval = 2")
    assert interval() == 2
    monkeypatch.setenv("KMQ_TRACKER__COMMIT_INTERVAL", "3")
    assert interval() == 3
    assert interval(4) == 4


def test_sources_meet_key_by_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section is no unit: its keys may come from different sources."""
    file.write_text("[tracker]\nstate_partitions = 7\nfleet_heartbeat = 7")
    monkeypatch.setenv("KMQ_TRACKER__FLEET_HEARTBEAT", "8")
    tracker = load_settings(file, {"tracker": {"restart_limit": 9}}).tracker
    assert (tracker.state_partitions, tracker.fleet_heartbeat, tracker.restart_limit) == (7, 8, 9)


def test_tables_and_lists_of_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMQ_KAFKA__EXTRA", '{"sasl.username": "me"}')
    monkeypatch.setenv("KMQ_TRACKER__QUEUES", '["a", "b"]')
    settings = load_settings()
    assert plain(settings.kafka.extra) == {"sasl.username": "me"}
    assert settings.tracker.queues == ("a", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trackr]\ntrigger = 'x'", "; did you mean 'tracker'?"),
        ("zzz = 1", "allowed are kafka, ledger, metrics, tracker, worker; remove it"),
        ("[tracker]\nqueues = ['a/b']", "setting tracker.queues.0 is not allowed: got 'a/b'"),
        ("[tracker]\nqueues = ['a@']", "setting tracker.queues.0 is not allowed: got 'a@'"),
        ("[tracker]\ntrigger = 'once'", "got 'once', input should be 'processing-time' or 'available-now'"),
        ("tracker = 3", "setting tracker is not allowed: got 3"),
        ("[kafka]\nbootstrap_servers = ''", "setting kafka.bootstrap_servers is not allowed: got ''"),
    ],
)
def test_what_is_wrong_in_the_file_is_reported_in_one_line(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert message in refusal(file)


@pytest.mark.parametrize(
    ("text", "message"), [("a = = 1", "is not valid TOML: got "), ("a = '\xff'", "is not valid TOML: got ")]
)
def test_file_that_is_no_toml_is_reported(file: Path, text: str, message: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    assert message in refusal(file)


def test_missing_file_and_folder_are_reported(tmp_path: Path) -> None:
    assert "No such file or directory; give an existing TOML file" in refusal(tmp_path / "nowhere.toml")
    assert "Is a directory; give an existing TOML file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KMQ_TRACKR__TRIGGER", "x", "got 'KMQ_TRACKR__TRIGGER' in the environment, allowed are kafka, ledger"),
        ("KMQ_TRACKR__TRIGGER", "x", "did you mean KMQ_TRACKER__…?"),
        ("KMQ_TRACKER__TRIGER", "x", "did you mean 'trigger'?"),
        ("KMQ_TRACKER__RESTART_LIMIT", "soon", "setting tracker.restart_limit is not allowed: got 'soon'"),
        ("KMQ_KAFKA__EXTRA", "{'a", "cannot read the KMQ_* variables: "),
    ],
)
def test_what_is_wrong_in_the_environment_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    assert message in refusal()


def test_other_variables_of_ours_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMQ_JARS_DIR", "/tmp")  # noqa: S108  # a value, not a file
    load_settings()


def test_secrets_are_in_no_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMQ_KAFKA__EXTRA", f'{{"sasl.password": "{SECRET}"}}')
    settings = load_settings(None, {"kafka": {"spark_extra": {"sasl.jaas.config": SECRET}}})
    assert plain(settings.kafka.extra) == {"sasl.password": SECRET}
    for text in (str(settings), repr(settings), repr(settings.kafka), settings.model_dump_json()):
        assert SECRET not in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("interceptor.classes", "x.Y"), ("sasl.login.callback.handler.class", "x.Y"), ("config.providers", "file"),
        ("sasl.jaas.config", "com.sun.security.auth.module.JndiLoginModule required;"),
    ],
)  # fmt: skip
def test_setting_for_spark_that_loads_classes_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    """From the file and from the environment, as from `--command-config`."""
    file.write_text(f"[kafka.spark_extra]\n'{key}' = '{value}'")
    message = f"setting {re.escape(key)} is not allowed: it loads classes into the process"
    with pytest.raises(ConfigError, match=message):
        load_settings(file)
    monkeypatch.setenv("KMQ_KAFKA__SPARK_EXTRA", json.dumps({key: value}))
    with pytest.raises(ConfigError, match=message):
        load_settings()


def test_login_callback_of_kafka_itself_is_allowed_for_spark() -> None:
    """Also by the name that it has on Databricks."""
    name = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
    for value in (name, f"kafkashaded.{name}"):
        extra = {"sasl.login.callback.handler.class": value}
        assert plain(load_settings(None, {"kafka": {"spark_extra": extra}}).kafka.spark_extra) == extra


@pytest.mark.parametrize(
    "text",
    [
        f"[kafka]\nextra = '{SECRET}'",
        f"[kafka]\nextra = ['{SECRET}']",
        f"[kafka.extra.sasl]\npassword = '{SECRET}'",
        f"[kafka]\nsasl.password = '{SECRET}'",
        f"kafka = '{SECRET}'",
        f"[kafka.extra]\n'sasl.password' = {{a = '{SECRET}'}}",
    ],
)
def test_secret_at_a_wrong_place_is_not_shown(file: Path, text: str) -> None:
    """Neither in the text nor in the traceback, whose causes a log would print too."""
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_settings(file)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_secret_in_a_variable_that_is_no_json_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMQ_KAFKA__EXTRA", f'{{"sasl.password": "{SECRET}"')
    with pytest.raises(ConfigError) as raised:
        load_settings()
    assert SECRET not in "".join(traceback.format_exception(raised.value))


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Return the sections with their models."""
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        yield name, field.annotation


def bounds_of(field: FieldInfo) -> str:
    """Return the bounds of a number as the page writes them, empty where it has none."""
    low = next((bound.ge for bound in field.metadata if isinstance(bound, annotated_types.Ge)), None)
    high = next((bound.le for bound in field.metadata if isinstance(bound, annotated_types.Le)), None)
    return f"{low} to {high}" if low is not None else ""


@pytest.mark.parametrize(("section", "model"), [*sections()])
def test_every_key_is_documented_and_every_bound_holds(section: str, model: type[BaseModel]) -> None:
    for key, field in model.model_fields.items():
        assert field.description, key
        bounds = re.fullmatch(r"(\d+) to (\d+)", bounds_of(field))
        if bounds is None:
            continue
        low, high = map(int, bounds.groups())
        for allowed in (low, high):
            assert getattr(getattr(load_settings(None, {section: {key: allowed}}), section), key) == allowed
        for refused in (low - 1, high + 1):
            assert f"setting {section}.{key} is not allowed: got {refused}" in refusal(None, {section: {key: refused}})


@pytest.mark.parametrize("name", ["local.toml", "cluster.toml"])
def test_shipped_files_can_be_read(name: str) -> None:
    assert load_settings(ROOT / "conf" / name).tracker.queues
