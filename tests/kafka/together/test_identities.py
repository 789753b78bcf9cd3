"""Clients with a certificate (mTLS) and clients with a token (OAUTHBEARER): every part works with one file."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from typer.testing import CliRunner

from kmq_spark import QueueConsumer, QueueProducer, read_client_properties
from kmq_spark.cli.main import app
from kmq_spark.config import load_settings
from kmq_spark.tracker.once import track_once
from tests.kafka.conftest import receive_all, wait_until
from tests.kafka.documents import blocks_of
from tests.kafka.identity import SECRET, token_server
from tests.kafka.secured import SecuredBroker
from tests.limits import COMES_S, ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.slow]

OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearer"
LISTENER = "listener.name.sasl_ssl.oauthbearer"
SHOWN = {"certificate": "ssl.keystore.location=/etc", "token": "sasl.mechanism=OAUTHBEARER"}
"""What the file of a kind of client has, and no other one of the page."""

JSON = ("-o", "json")
PARTS = ("producer", "consumer", "tracker", "viewer")


class Identities(NamedTuple):
    """Three brokers, and the address of their token server."""

    secured: SecuredBroker
    issuer: str

    def properties(self, kind: str, part: str) -> Path:
        """Write the one file of a part's clients: what docs/security.md shows, with the addresses and files of here."""
        cluster = self.secured.cluster
        (shown,) = (block.text for block in blocks_of("docs/security.md") if SHOWN[kind] in block.text)
        address = cluster.bootstrap_servers
        if kind == "certificate":
            settings = (cluster.brokers[0].data_dir / "server.properties").read_text()
            (address,) = re.findall(r"^advertised\.listeners=.*BROKERS://([\d.:]+)$", settings, re.MULTILINE)
        for old, new in (
            (r"kafka-1.*", address), ("/etc/kmq/ca.pem", cluster.certificate("ca")), ("https://issuer", self.issuer),
            ("/etc/kmq/client.pem", cluster.certificate(part)), ('clientId="…"', f'clientId="{part}"'),
            ('clientSecret="…"', f'clientSecret="{SECRET}{part}"'),
        ):  # fmt: skip
            shown = re.sub(old, str(new), shown)
        file = self.secured.folder / f"{kind}-{part}.properties"
        file.write_text(shown)
        return file


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identities]:
    """Brokers that know their clients by certificates on one listener, and by tokens on the other one."""
    folder = tmp_path_factory.mktemp("identities")
    with token_server(folder) as issuer:
        extra = {
            "listener.name.brokers.ssl.principal.mapping.rules": "RULE:^CN=broker$/CN=broker/,RULE:^CN=([a-z-]+)$/$1/",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
            f"{LISTENER}.sasl.jaas.config": f"{OAUTH}LoginModule required;",
            f"{LISTENER}.sasl.server.callback.handler.class": f"{OAUTH}ValidatorCallbackHandler",
            f"{LISTENER}.sasl.oauthbearer.jwks.endpoint.url": f"{issuer}/keys",
            f"{LISTENER}.sasl.oauthbearer.expected.audience": "kafka",
        }
        secured = SecuredBroker(
            folder,
            brokers=3,
            extra=extra,
            java_options=f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={issuer}/keys",
        )
        try:
            yield Identities(secured, issuer)
        finally:
            secured.close()


@pytest.mark.parametrize("kind", ["certificate", "token"])
def test_parts_work_with_one_file_of_what_kmq_acls_lists(identities: Identities, kind: str) -> None:
    """Send; take and reject; the tracker writes the dead letter; the viewer sees it, and the producer must not."""
    secured = identities.secured
    secured.grant(kind, "creator", *PARTS)
    secured.create("queue", "create", kind)
    file = {part: identities.properties(kind, part) for part in PARTS}
    with QueueProducer(kind, **read_client_properties(file["producer"])) as producer:
        producer.send("bad")
    with QueueConsumer(kind, **read_client_properties(file["consumer"])) as consumer:
        (message,) = receive_all(consumer, 1)
        message.reject("no such customer")
    environment = {"KMQ_TRACKER__CHECKPOINT_DIR": str(secured.folder / kind), "KMQ_TRACKER__TRIGGER": "available-now"}
    run = (sys.executable, "-m", "kmq_spark.cli.main", "tracker", "run", kind, "--command-config", file["tracker"])
    done = subprocess.run(
        run, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=ENDS_S
    )
    assert done.returncode == 0, done.stderr
    listing = ("dlq", "list", kind)
    listed = CliRunner().invoke(app, [*listing, *JSON, "--command-config", str(file["viewer"])])
    assert [letter["value"] for letter in json.loads(listed.stdout)] == ["bad"], listed.output
    refused = CliRunner().invoke(app, [*listing, "--command-config", str(file["producer"])])
    assert refused.exit_code == 1


def presented(identities: Identities) -> set[object]:
    """Return the serial numbers of the certificates that new connections of the clients' listeners see."""
    cluster = identities.secured.cluster
    tls = ssl.create_default_context(cafile=cluster.certificate("ca"))
    found: set[object] = set()
    for broker in cluster.brokers:
        with (
            socket.create_connection(("127.0.0.1", broker.port), timeout=COMES_S) as plain,
            tls.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            found.add((connection.getpeercert() or {})["serialNumber"])
    return found


def renew(identities: Identities) -> None:
    """Give the brokers, while they run, another certificate of the same CA, in a new file."""
    secured = identities.secured
    certificate = secured.cluster.certificate("broker")
    old = certificate.rename(certificate.with_name("old.pem"))
    new = secured.cluster.certificate("broker").rename(certificate.with_name("new.pem"))
    old.rename(certificate)
    for number in range(len(secured.cluster.brokers)):
        entry = ConfigEntry(
            "listener.name.sasl_ssl.ssl.keystore.location", str(new), incremental_operation=AlterConfigOpType.SET
        )
        broker = ConfigResource(ResourceType.BROKER, str(number + 1), incremental_configs=[entry])
        for future in secured.admin.incremental_alter_configs([broker]).values():
            future.result(COMES_S)


def test_no_message_is_lost_while_the_certificate_is_renewed(identities: Identities) -> None:
    """Then all clients must connect anew, since each broker restarts in turn."""
    secured, queue, is_over = identities.secured, "renewed", threading.Event()
    secured.grant(queue, "creator", "producer", "consumer", "tracker", "viewer")
    secured.create("queue", "create", queue)
    sent: list[bytes] = []
    handled: set[bytes | None] = set()

    def send() -> None:
        with QueueProducer(queue, **read_client_properties(secured.properties("producer"))) as producer:
            while not is_over.wait(0.01):
                sent.append(b"%d" % len(sent))
                producer.send(sent[-1])

    def goes_on() -> bool:
        """Return whether new messages come. One whose START got no answer comes again by the tracker, at the end."""
        count = len(sent)
        return wait_until(lambda: len(handled.intersection(sent[count:])) >= 50)

    def are_all_acked() -> bool:
        """Return whether no message is ready or held, after what is due has been redelivered."""
        track_once(queue, load_settings(None, {"kafka": read_client_properties(secured.properties("tracker"))}))
        return not json.loads(secured.kmq("viewer", "queue", "peek", queue, *JSON).stdout)

    consumer = QueueConsumer(queue, **read_client_properties(secured.properties("consumer")), lease=3)
    with ThreadPoolExecutor(2) as pool:
        sending, handling = pool.submit(send), pool.submit(consumer.run, lambda message: handled.add(message.value))
        try:
            assert goes_on()
            old = presented(identities)
            renew(identities)
            # A broker's network threads, which take turns, change one after the other.
            assert wait_until(lambda: not any(old & presented(identities) for _ in range(4)))
            assert goes_on()
            for broker in secured.cluster.brokers:
                broker.restart()
                assert goes_on()
            assert not old & presented(identities)
            is_over.set()
            sending.result(ENDS_S)
            assert wait_until(are_all_acked)
            assert handled == set(sent)
        finally:
            is_over.set()
            consumer.stop()
        handling.result(ENDS_S)
