"""Errors of a client that cannot reach a broker: the reason, and the setting to correct."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmq_spark.errors import ConfigError, KafkaClientError
from kmq_spark.kafka.topics import check_queue
from tests.kafka.identity import token_server

pytestmark = pytest.mark.kafka

TIMEOUT_S = 2.0
LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": "secret-canary"}


def test_reason_of_a_failed_handshake_is_in_the_error(bootstrap_servers: str) -> None:
    """A broker that is down and a broker with another security protocol have different errors."""
    extra = {"security.protocol": "SASL_PLAINTEXT", **LOGIN}
    with pytest.raises(KafkaClientError) as raised:
        check_queue("orders", bootstrap_servers=bootstrap_servers, timeout=TIMEOUT_S, extra=extra)
    assert "SASL PLAIN mechanism handshake failed" in str(raised.value)
    assert "; set security.protocol, sasl.* and ssl.* in [kafka.extra] as the broker's listener" in str(raised.value)
    assert "secret-canary" not in str(raised.value)


def test_broker_that_is_down_is_reported_by_the_connection_s_own_error() -> None:
    with pytest.raises(KafkaClientError, match=r"127\.0\.0\.1:1: Connect to .* failed: Connection refused .* runs"):
        check_queue("orders", bootstrap_servers="127.0.0.1:1", timeout=TIMEOUT_S)


def test_token_server_that_refuses_a_client_is_in_the_error(tmp_path: Path) -> None:
    """Without a token the client connects to no broker."""
    login = {"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "me"}
    with token_server(tmp_path) as issuer:
        extra = {
            "security.protocol": "SASL_PLAINTEXT", **login, "sasl.oauthbearer.client.secret": "secret-canary",
            "sasl.oauthbearer.token.endpoint.url": issuer,
        }  # fmt: skip
        with pytest.raises(KafkaClientError) as raised:
            check_queue("orders", bootstrap_servers="127.0.0.1:1", timeout=TIMEOUT_S, extra=extra)
    assert f'Failed to retrieve OIDC token from "{issuer}": {{"error": "invalid_client"}} (401)' in str(raised.value)
    assert str(raised.value).endswith("check sasl.* and ssl.* in [kafka.extra]")
    assert "secret-canary" not in str(raised.value)


def test_certificate_file_that_does_not_exist_is_reported_with_its_setting(
    bootstrap_servers: str, tmp_path: Path
) -> None:
    extra = {"security.protocol": "SSL", "ssl.ca.location": str(tmp_path / "missing.pem")}
    with pytest.raises(ConfigError, match=r"setting ssl\.ca\.location cannot be used: .*; give an existing") as raised:
        check_queue("orders", bootstrap_servers=bootstrap_servers, extra=extra)
    assert "missing.pem" not in str(raised.value)
