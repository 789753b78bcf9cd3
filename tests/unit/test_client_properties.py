"""One client.properties reaches both clients, by their own names, or is refused with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kmq_spark.client_properties import parse_properties, read_client_properties, to_java, to_librdkafka
from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "canary-55ab"

SCRAM = (
    "org.apache.kafka.common.security.scram.ScramLoginModule required "
    f'username="kmq" password="{SECRET}";'
)  # fmt: skip


def test_properties_file_is_read_as_java_reads_it() -> None:
    text = r"""
# comment
! another
security.protocol=SASL_SSL
sasl.mechanism : SCRAM-SHA-512
ssl.key.password   with spaces
a\=b = x\u0041\ty
sasl.jaas.config=one \
    two \
    three
"""
    assert parse_properties(text, "file") == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "ssl.key.password": "with spaces",
        "a=b": "xA\ty",
        "sasl.jaas.config": "one two three",
    }


def test_java_names_become_those_of_librdkafka() -> None:
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": SCRAM,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": "/me.p12",
        "ssl.keystore.password": "p",
        "ssl.endpoint.identification.algorithm": "",
        "request.timeout.ms": "30000",
    }
    assert to_librdkafka(given) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "kmq",
        "sasl.password": SECRET,
        "ssl.ca.location": "/ca.pem",
        "ssl.keystore.location": "/me.p12",
        "ssl.keystore.password": "p",
        "ssl.endpoint.identification.algorithm": "none",
    }


def test_names_of_librdkafka_become_those_of_java() -> None:
    """So that one file reaches Spark's source too."""
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": 'a"b',
        "sasl.password": SECRET,
        "ssl.ca.location": "/ca.pem",
        "linger.ms": "5",
    }
    assert to_java(given) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="a\\"b" password="{SECRET}";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
    }


def test_java_to_librdkafka_and_back_keeps_user_and_password() -> None:
    there = to_librdkafka({"sasl.mechanism": "SCRAM-SHA-256", "sasl.jaas.config": SCRAM})
    assert to_java(there)["sasl.jaas.config"] == SCRAM


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("interceptor.classes", "x.Y", "it loads classes into the process; remove it"),
        ("config.providers", "file", "it loads classes"),
        ("sasl.jaas.config", "com.sun.security.auth.module.JndiLoginModule required;", "it loads classes"),
        ("sasl.jaas.config", f"my.Module required password={SECRET};", "cannot be translated"),
        ("ssl.keystore.location", "/me.jks", "a store of type JKS; expected PEM, PKCS12; convert it"),
    ],
)
def test_what_cannot_be_translated_is_refused_without_its_value(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        to_librdkafka({key: value})
    assert message in str(raised.value)
    assert SECRET not in str(raised.value)


def test_certificate_and_key_in_two_files_are_refused_for_spark() -> None:
    with pytest.raises(ConfigError, match=r"put certificate chain and key into one PEM file"):
        to_java({"ssl.certificate.location": "/cert.pem", "ssl.key.location": "/key.pem"})


def test_file_becomes_the_arguments_of_a_client(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text(f"bootstrap.servers=a:9093\nsecurity.protocol=SASL_SSL\nsasl.jaas.config={SCRAM}\n")
    extra = {"security.protocol": "SASL_SSL", "sasl.username": "kmq", "sasl.password": SECRET}
    assert read_client_properties(file) == {"bootstrap_servers": "a:9093", "extra": extra}
    assert read_client_properties(str(file), "b:9093") == {"bootstrap_servers": "b:9093", "extra": extra}


def test_file_that_gives_no_connection_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    with pytest.raises(ConfigError, match=r"got '.*client\.properties': No such file"):
        read_client_properties(file)
    file.write_text(f"sasl.jaas.config={SCRAM}\n")
    with pytest.raises(ConfigError, match=r"bootstrap\.servers is missing in '.*client\.properties'") as raised:
        read_client_properties(file)
    assert SECRET not in str(raised.value)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        read_client_properties(file)


def test_oauth_of_a_java_client_reaches_both_clients() -> None:
    """The class that fetches its token is for Java alone."""
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearer"
    given = {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.login.callback.handler.class": f"{module}LoginCallbackHandler",
        "sasl.jaas.config": f'{module}LoginModule required clientId="me" clientSecret="{SECRET}";',
        "sasl.oauthbearer.token.endpoint.url": "https://issuer/token",
    }
    assert to_java(given) == given
    assert to_librdkafka(given) == {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": "https://issuer/token",
    }


def test_oauth_of_librdkafka_reaches_both_clients() -> None:
    """Java gets client and secret as options of its login module, which all its versions know."""
    package = "org.apache.kafka.common.security.oauthbearer.OAuthBearer"
    both = {
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": "https://issuer/token",
        "sasl.oauthbearer.sub.claim.name": "azp",
    }
    for middle in ("", ".credentials.client"):
        given = {
            **both,
            "sasl.oauthbearer.method": "oidc",
            f"sasl.oauthbearer.client{middle}.id": "me",
            f"sasl.oauthbearer.client{middle}.secret": SECRET,
            "sasl.oauthbearer.scope": "kafka",
        }
        assert to_librdkafka(given) == given
        assert to_java(given) == {
            **both,
            "sasl.login.callback.handler.class": f"{package}LoginCallbackHandler",
            "sasl.jaas.config": f'{package}LoginModule required clientId="me" clientSecret="{SECRET}" scope="kafka";',
        }
    there = to_librdkafka(to_java(given))
    assert to_java(there) == to_java(given)


def test_oauth_that_only_librdkafka_knows_is_refused_for_spark() -> None:
    with pytest.raises(ConfigError, match=r"client credentials") as raised:
        to_java({"sasl.oauthbearer.config": SECRET})
    assert SECRET not in str(raised.value)
