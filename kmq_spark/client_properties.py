"""
Translate client settings between librdkafka and the Java client, so that one configuration works for both.

Rule 1: a `client.properties` file for Kafka's own tools is sufficient; keys with other names in librdkafka are renamed.
Rule 2: a setting that cannot be translated is an error that says what to do; it is never ignored silently.
Rule 3: settings that load classes into a JVM are rejected, whatever their source.
Rule 4: error texts never contain a value, because any value may be a password.

Source: Kafka's `SslConfigs`, `SaslConfigs`; librdkafka's CONFIGURATION.md; CVE-2023-25194, CVE-2024-31141 for rule 3.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kmq_spark.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JAAS, CALLBACKS = "sasl.jaas.config", "sasl.login.callback.handler.class"

RENAMED = {
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.key.password": "ssl.key.password",
    "ssl.keystore.password": "ssl.keystore.password",
    "sasl.oauthbearer.token.endpoint.url": "sasl.oauthbearer.token.endpoint.url",
    "ssl.cipher.suites": "ssl.cipher.suites",
}
"""Keys of the Java client whose values librdkafka accepts unchanged, and the names of these keys in librdkafka."""

SAME = frozenset(
    {
        *("bootstrap.servers", "security.protocol", "sasl.mechanism", "sasl.kerberos.service.name", "client.id"),
        *("reconnect.backoff.ms", "reconnect.backoff.max.ms", "connections.max.idle.ms", "metadata.max.age.ms"),
        *("client.dns.lookup", "retry.backoff.ms", "socket.connection.setup.timeout.ms"),
        "sasl.oauthbearer.sub.claim.name",
    }
)
"""Keys with the same name and meaning in both clients."""

TUNING = re.compile(
    r"request\.timeout\.ms|default\.api\.timeout\.ms|(send|receive)\.buffer\.bytes|metrics\..*|ssl\.protocol"
    r"|ssl\.enabled\.protocols|ssl\.provider|ssl\.(truststore|keystore)\.type|socket\.connection\.setup\.timeout\.max\.ms"
    r"|ssl\.truststore\.password|sasl\.login\.refresh\..*|key\.(de)?serializer|value\.(de)?serializer"
    r"|auto\.offset\.reset|sasl\.oauthbearer\.(scope\.claim\.name|header\.urlencode)"
)
"""Java keys without a counterpart in librdkafka that can be left out; the relevant ones are translated separately."""

JAVA_ONLY = re.compile(
    r"sasl\.jaas\.config|sasl\.login\..*|sasl\.client\.callback\..*|ssl\.truststore\..*|ssl\.keystore\.(type|key|certificate\.chain)"
    r"|ssl\.protocol|ssl\.enabled\.protocols|ssl\.provider|ssl\.engine\.factory\.class"
)
"""Connection settings that only the Java client knows."""

OAUTH = {
    "sasl.oauthbearer.client.id": "clientId",
    "sasl.oauthbearer.client.credentials.client.id": "clientId",
    "sasl.oauthbearer.client.secret": "clientSecret",
    "sasl.oauthbearer.client.credentials.client.secret": "clientSecret",
    "sasl.oauthbearer.scope": "scope",
}
"""OAuth's client credentials: keys of librdkafka and of newer Java clients, and options of `sasl.jaas.config`."""

OIDC = {"sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.grant.type": "client_credentials"}
"""What librdkafka needs so that it fetches tokens itself. For the Java client its login callback handler says so."""

JAVA_KEPT = re.compile(
    r"ssl\.(truststore|keystore)\..*|sasl\.jaas\.config|sasl\.login\.callback\.handler\.class"
    r"|sasl\.oauthbearer\.(scope\.claim\.name|header\.urlencode)"
)
"""Keys that only the Java client knows, and Spark's source gets."""

JAVA_ONLY_HINTS = {
    JAAS: "sasl.username and sasl.password",
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
}
"""The corresponding librdkafka settings for some of these keys."""

UNSAFE_KEY = re.compile(r".*\.class|.*\.classes|interceptor\..*|metric\.reporters|config\.providers(\..*)?")
UNSAFE_MODULE = re.compile(r"JndiLoginModule|LdapLoginModule")
OAUTH_PACKAGE = "org.apache.kafka.common.security.oauthbearer."

KNOWN_MODULES = ("PlainLoginModule", "ScramLoginModule", "OAuthBearerLoginModule", "Krb5LoginModule")
_OPTION = re.compile(r'([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')


class ClientConnection(TypedDict):
    """Arguments of every class and function that connects to a broker."""

    bootstrap_servers: str
    extra: dict[str, str]


def read_client_properties(file: str | Path, bootstrap_servers: str = "") -> ClientConnection:
    """
    Read a file of Kafka's client properties, the same as `--command-config` takes.

        QueueConsumer("orders", **read_client_properties("client.properties"))

    Args:
        file: `key=value` lines, with names of the Java client or of librdkafka.
        bootstrap_servers: Address instead of the one in the file.

    Raises:
        ConfigError: The file cannot be read, a setting cannot be translated, or there is no address.
    """
    extra = to_librdkafka(read_properties(file))
    in_file = extra.pop("bootstrap.servers", "")
    if not (bootstrap_servers or in_file):
        raise ConfigError(
            f"bootstrap.servers is missing in {str(file)!r}: expected host:port; add it, or give bootstrap_servers"
        )
    return ClientConnection(bootstrap_servers=bootstrap_servers or in_file, extra=extra)


def read_properties(file: str | Path) -> dict[str, str]:
    """Return the settings in a file, not translated."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        message = f"cannot read the client properties: got {str(file)!r}: {why}; give an existing file"
        raise ConfigError(message) from error
    return parse_properties(text, str(file))


def parse_properties(text: str, source: str) -> dict[str, str]:
    r"""
    Read a Java properties file: `key=value`, `key: value` or `key value`; comments begin with `#` or `!`; `\\`
    continues a line.
    """
    found = {}
    for line in _logical_lines(text):
        key, separator, value = _split(line)
        if not key or not separator:
            # The line is not shown: it may be a password without its key.
            raise ConfigError(f"a client setting in {source} has no key or no '=': expected key=value; correct it")
        found[_unescaped(key)] = _unescaped(value)
    return found


def to_librdkafka(properties: Mapping[str, str]) -> dict[str, str]:
    """Translate settings to librdkafka, by their names in the Java client, in librdkafka, or mixed."""
    check_safe(properties)
    found: dict[str, str] = {}
    for key, value in properties.items():
        if key in RENAMED:
            found[RENAMED[key]] = value
        elif key == JAAS:
            found |= _from_jaas(value)
        elif key == "ssl.endpoint.identification.algorithm":
            # In the Java client, an empty value disables host name verification.
            found[key] = value.strip().lower() or "none"
        elif key in {"ssl.truststore.location", "ssl.keystore.location"}:
            found |= _from_store(key, value, properties)
        elif key != CALLBACKS and TUNING.fullmatch(key) is None:  # librdkafka fetches OAuth's token itself
            found[key] = value
    return found


def to_java(properties: Mapping[str, str]) -> dict[str, str]:
    """
    Translate settings to the Java client that Spark's Kafka source uses.

    Tuning settings of librdkafka have no counterpart and are left out.
    """
    check_safe(properties)
    _check_has_java_name(properties)
    found: dict[str, str] = {}
    backwards = {ours: theirs for theirs, ours in RENAMED.items()}
    for key, value in properties.items():
        if key in backwards:
            found[backwards[key]] = value
        elif key in SAME or JAVA_KEPT.fullmatch(key):
            found[key] = value
        elif key == "sasl.mechanisms":
            found["sasl.mechanism"] = value
        elif key == "ssl.endpoint.identification.algorithm":
            found[key] = "" if value == "none" else value
        elif key == "ssl.ca.location":
            found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": value}
    if {"ssl.certificate.pem", "ssl.key.pem"} & properties.keys():
        found["ssl.keystore.type"] = "PEM"
    if "ssl.ca.pem" in properties:
        found["ssl.truststore.type"] = "PEM"
    found.pop("client.id", None)
    return found | _to_jaas(properties)


def _logical_lines(text: str) -> Iterator[str]:
    waiting = ""
    for line in text.splitlines():
        stripped = line.lstrip()
        if not waiting and (not stripped or stripped[0] in "#!"):
            continue
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            waiting += stripped[:-1]
            continue
        yield (waiting + stripped).strip()
        waiting = ""
    if waiting:
        yield waiting.strip()


def _split(line: str) -> tuple[str, str, str]:
    found = re.match(r"((?:[^\\:=\s]|\\.)*)(\s*[:=]\s*|\s+)?(.*)", line, re.DOTALL)
    return (found[1], found[2] or "", found[3]) if found is not None else ("", "", "")


def _unescaped(text: str) -> str:
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t", "r": "\r"}.get(found[1], found[1]), text)


def is_java_only(key: str) -> bool:
    """Return whether only the Java client knows a key."""
    return JAVA_ONLY.fullmatch(key) is not None


def check_safe(properties: Mapping[str, str]) -> None:
    """Check that no setting makes a Java client load classes, other than Kafka's own callbacks of OAuth."""
    for key, value in properties.items():
        # Databricks relocates its Kafka client to another package.
        if key == CALLBACKS and value.removeprefix("kafkashaded.").startswith(OAUTH_PACKAGE):
            continue
        if UNSAFE_KEY.fullmatch(key) is not None or (key == JAAS and UNSAFE_MODULE.search(value)):
            raise ConfigError(f"setting {key} is not allowed: it loads classes into the process; remove it")


def _check_has_java_name(properties: Mapping[str, str]) -> None:
    """Check that no setting of the connection is for librdkafka alone."""
    for key, value in properties.items():
        if key in {"ssl.certificate.location", "ssl.key.location"}:
            what_to_do = (
                "put certificate chain and key into one PEM file, set ssl.keystore.type=PEM and ssl.keystore.location "
                "to it"
            )
        elif (
            key.startswith("sasl.oauthbearer.")
            and not (key in RENAMED or key in SAME or key in OAUTH or JAVA_KEPT.fullmatch(key))
            and OIDC.get(key) != value.lower()
        ):
            what_to_do = "set sasl.oauthbearer.method=oidc, sasl.oauthbearer.client.id and .secret (client credentials)"
        else:
            continue
        raise ConfigError(f"setting {key} has no counterpart in Spark's Java client; {what_to_do}")


def _from_jaas(value: str) -> dict[str, str]:
    module = next((name for name in KNOWN_MODULES if name in value), "")
    options = {name: re.sub(r"\\(.)", r"\1", quoted) or plain for name, quoted, plain in _OPTION.findall(value)}
    if module in {"PlainLoginModule", "ScramLoginModule"} and {"username", "password"} <= options.keys():
        return {"sasl.username": options["username"], "sasl.password": options["password"]}
    if module == "OAuthBearerLoginModule":
        # Newer Java clients may have client and secret in keys of their own, which librdkafka knows too.
        given = {
            ours: options[theirs] for ours, theirs in OAUTH.items() if theirs in options and ".credentials." not in ours
        }
        return {"sasl.oauthbearer.method": "oidc", **given}
    if module == "Krb5LoginModule":
        names = {"principal": "sasl.kerberos.principal", "keyTab": "sasl.kerberos.keytab"}
        return {ours: options[theirs] for theirs, ours in names.items() if theirs in options}
    raise ConfigError(
        f"{JAAS} cannot be translated: expected {', '.join(KNOWN_MODULES)} with their user and password; "
        "correct it, or set librdkafka's own keys (sasl.username, sasl.password)"
    )


def _to_jaas(properties: Mapping[str, str]) -> dict[str, str]:
    mechanism = properties.get("sasl.mechanism", properties.get("sasl.mechanisms", "")).upper()
    if given := {theirs: properties[ours] for ours, theirs in OAUTH.items() if ours in properties}:
        found = {CALLBACKS: f"{OAUTH_PACKAGE}OAuthBearerLoginCallbackHandler"} if CALLBACKS not in properties else {}
        return {**found, JAAS: f"{OAUTH_PACKAGE}OAuthBearerLoginModule required {_options(given)};"}
    if JAAS in properties or "sasl.username" not in properties:
        return {}
    package = "org.apache.kafka.common.security"
    module = f"{package}.plain.PlainLoginModule" if mechanism == "PLAIN" else f"{package}.scram.ScramLoginModule"
    user = {name: properties.get(f"sasl.{name}", "") for name in ("username", "password")}
    return {JAAS: f"{module} required {_options(user)};"}


def _options(values: Mapping[str, str]) -> str:
    quoted = {name: re.sub(r'(["\\])', r"\\\1", value) for name, value in values.items()}
    return " ".join(f'{name}="{value}"' for name, value in quoted.items())


def _from_store(key: str, path: str, properties: Mapping[str, str]) -> dict[str, str]:
    kind = properties.get(key.replace(".location", ".type"), "JKS").upper()
    is_trust = key == "ssl.truststore.location"
    if kind == "PEM":
        if is_trust:
            return {"ssl.ca.location": path}
        return {"ssl.certificate.location": path, "ssl.key.location": path}
    if kind == "PKCS12" and not is_trust:
        return {"ssl.keystore.location": path}
    allowed = "PEM" if is_trust else "PEM, PKCS12"
    raise ConfigError(
        f"setting {key} cannot be used by librdkafka: got a store of type {kind}; expected {allowed}; convert it "
        "(keytool -importkeystore -deststoretype PKCS12 …, then openssl pkcs12 -out store.pem) and set "
        f"{key.replace('.location', '.type')}=PEM"
    )
