"""
Several embedded brokers as one cluster, on request with TLS, users and an authorizer that denies by default.

Rule 1: each broker is a controller too. Of three, one may be dead or suspended (`cluster.brokers[1].kill()`): records
and internal topics have a replica on each broker, and are acknowledged when all but one have them.
Rule 2: secure means that clients use SASL_SSL with SCRAM-SHA-512, and that brokers and controllers show each other a
certificate, on listeners of their own. Passwords and keys are in files that only this user may read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kmq_spark.client_properties import read_client_properties
from kmq_spark.errors import SetupError
from kmq_spark.local.broker import EmbeddedBroker, Member, new_id, remove_own
from kmq_spark.local.probe import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPERATOR = "admin"
"""The user to whom the authorizer allows everything."""

_MECHANISM = "SCRAM-SHA-512"
_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required"


class EmbeddedCluster:
    """
    Kafka brokers that this process starts and ends; use it as a context manager, or call `start` and `close`.

    With *users* it is secure: each of them, and the operator, has a file of client properties (`properties`).
    """

    def __init__(
        self,
        count: int = 3,
        folder: Path | None = None,
        port: int | None = None,
        *,
        users: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._is_temporary = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="kmq-cluster-")) if folder is None else folder.absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = os.getpid()
        self._remove_data = weakref.finalize(self, remove_own, self.folder, owner) if self._is_temporary else None
        self._users = tuple(dict.fromkeys((OPERATOR, *users))) if users else ()
        self._check(count)
        self._ports = [port or free_port(), *(free_port() for _ in range(count - 1))]
        self._controllers = [self._controller_port(number) for number in range(1, count + 1)]
        tls, options = self._secure() if users else (None, [])
        voters = (f"{number}@127.0.0.1:{at}:{new_id()}" for number, at in enumerate(self._controllers, 1))
        options += [f"--cluster-id={new_id()}", f"--initial-controllers={','.join(voters)}"]
        removed = str(self.folder) if self._is_temporary else ""
        self.brokers = []
        for number, its_port in enumerate(self._ports, 1):
            probe_port = free_port() if tls else its_port
            settings = self._settings(number, probe_port) | dict(extra or {})
            member = Member(number, count == 1, probe_port, tuple(options), removed, tls)
            self.brokers.append(EmbeddedBroker(self._of(number), its_port, settings, environment, member))

    @property
    def bootstrap_servers(self) -> str:
        """Bootstrap address for Kafka clients: all brokers."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    @property
    def is_running(self) -> bool:
        """Whether a broker runs."""
        return any(broker.is_running for broker in self.brokers)

    def start(self) -> Self:
        """Start the brokers that do not run, and wait until each of them is ready."""
        try:
            with ThreadPoolExecutor(len(self.brokers)) as pool:
                list(pool.map(EmbeddedBroker.start, self.brokers))
        except SetupError:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Kill the brokers, and remove their data if they are temporary."""
        for broker in self.brokers:
            broker.kill()  # a clean stop of all would wait for a majority of controllers
        if self._remove_data is not None:
            self._remove_data()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_logs(self) -> Path:
        """Copy the logs of the first broker to a folder that is kept."""
        return self.brokers[0].save_logs()

    def properties(self, user: str = OPERATOR) -> Path:
        """Return the client properties of a user of a secure cluster, as Kafka's own tools take them."""
        return self.folder / f"{user}.properties"

    def certificate(self, name: str) -> Path:
        """Return a PEM file with a key and a certificate of this name; make them first if they are not there."""
        file, ca, ca_key = (self.folder / each for each in (f"{name}.pem", "ca.pem", "ca.key"))
        if not file.exists():
            kind = ("-CA", ca, "-CAkey", ca_key, "-addext", "subjectAltName=IP:127.0.0.1") if name != "ca" else ()
            _openssl(
                *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", f"/CN={name}", *kind),
                *("-keyout", file if kind else ca_key, "-out", file),
            )
            if kind:
                file.write_text(file.read_text() + ca.read_text())
        return file

    def _of(self, number: int) -> Path:
        return self.folder / str(number)

    def _check(self, count: int) -> None:
        there = len(list(self.folder.glob("*/log/meta.properties")))
        if there and (there != count or self.properties().exists() != bool(self._users)):
            raise SetupError(
                f"cannot use the data in {str(self.folder)!r}: they are of {there} brokers"
                f"{', with users' if self.properties().exists() else ''}; give the same options, or a new folder"
            )

    def _controller_port(self, number: int) -> int:
        """Return the port that is in the controllers' log, or a new one."""
        file = self._of(number) / "controller.port"
        if not file.exists():
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.write_text(str(free_port()))
        return int(file.read_text())

    def _secure(self) -> tuple[ssl.SSLContext, list[str]]:
        """Make certificates and users that are not there; return the probe's TLS and the options that format users."""
        tls = ssl.create_default_context(cafile=self.certificate("ca"))
        tls.load_cert_chain(self.certificate("broker"))
        options = []
        for user in self._users:
            file = self.properties(user)
            known = read_client_properties(file)["extra"] if file.exists() else {}
            password = known.get("sasl.password", secrets.token_urlsafe(16))
            file.touch(mode=0o600)
            file.write_text(
                f"bootstrap.servers={self.bootstrap_servers}\nsecurity.protocol=SASL_SSL\nsasl.mechanism={_MECHANISM}\n"
                f'sasl.jaas.config={_LOGIN} username="{user}" password="{password}";\n'
                f"ssl.truststore.type=PEM\nssl.truststore.location={self.folder / 'ca.pem'}\n"
            )
            options.append(f"--add-scram={_MECHANISM}=[name={user},password={password}]")
        return tls, options

    def _settings(self, number: int, probe_port: int) -> dict[str, str]:
        """Return the properties in which a broker of a cluster differs from one alone."""
        count, port, controller = len(self._ports), self._ports[number - 1], self._controllers[number - 1]
        settings = {
            "node.id": str(number),
            "controller.quorum.bootstrap.servers": ",".join(f"127.0.0.1:{each}" for each in self._controllers),
            "default.replication.factor": str(count),
            "min.insync.replicas": str(max(1, count - 1)),
        }
        for topic in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
            settings[f"{topic}.replication.factor"] = str(count)
        for topic in ("transaction.state.log", "share.coordinator.state.topic"):
            settings[f"{topic}.min.isr"] = str(max(1, count - 1))
        if not self._users:
            return settings
        listeners = f"SASL_SSL://127.0.0.1:{port},BROKERS://127.0.0.1:{probe_port}"
        return settings | {
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "SASL_SSL:SASL_SSL,BROKERS:SSL,CONTROLLER:SSL",
            "inter.broker.listener.name": "BROKERS",
            **{f"listener.name.{name}.ssl.client.auth": "required" for name in ("brokers", "controller")},
            **{f"ssl.{store}.type": "PEM" for store in ("keystore", "truststore")},
            "ssl.keystore.location": str(self.folder / "broker.pem"),
            "ssl.truststore.location": str(self.folder / "ca.pem"),
            "sasl.enabled.mechanisms": _MECHANISM,
            f"listener.name.sasl_ssl.{_MECHANISM.lower()}.sasl.jaas.config": f"{_LOGIN};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": f"User:CN=broker;User:{OPERATOR}",
        }


def _openssl(*arguments: str | Path) -> None:
    """Run openssl, which writes keys readable for this user only."""
    if (program := shutil.which("openssl")) is None:
        raise SetupError("a secure cluster needs certificates: got no openssl in PATH; install OpenSSL 3")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, umask=0o077)
    if done.returncode != 0:
        raise SetupError(f"openssl cannot make a certificate: {done.stderr.strip()}; install OpenSSL 3")
