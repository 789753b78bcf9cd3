"""A broker with Kafka's own authorizer, and a user for each part of a queue, named after it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from typer.testing import CliRunner, Result

from kmq_spark.cli.acls import PARTS
from kmq_spark.cli.main import app
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java
from kmq_spark.local.probe import free_port
from tests.brokers import quick_broker
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
RESOURCES = {
    "topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "transactional-id": ResourceType.TRANSACTIONAL_ID,
}  # fmt: skip
OPERATIONS = {"".join(name.capitalize() for name in each.name.split("_")): each for each in AclOperation}


class SecuredBroker:
    """
    A broker that refuses what no ACL allows.

    Clients of the parts connect to a listener of their own, where they say who they are. On the other one, which the
    broker itself uses, everybody is its superuser.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        open_port, port, controller_port = (free_port() for _ in range(3))
        self.bootstrap_servers = f"127.0.0.1:{port}"
        data_dir = folder / "broker"
        data_dir.mkdir()
        # Chosen here, since the listeners name it.
        (data_dir / "controller.port").write_text(str(controller_port))
        listeners = f"PLAINTEXT://127.0.0.1:{open_port},SASL_PLAINTEXT://127.0.0.1:{port}"
        users = " ".join(f'user_{part}="{_password(part)}"' for part in PARTS)
        extra = {
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{LOGIN} {users};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": "User:ANONYMOUS",
        }
        self.broker = quick_broker(data_dir, open_port, extra).start()
        self.admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})

    @classmethod
    @contextmanager
    def with_queue(cls, folder: Path, queue: str, *parts: str, options: tuple[str, ...] = ()) -> Iterator[Self]:
        """Run a broker for the time of a block, with a queue of one partition."""
        secured = cls(folder)
        try:
            secured.grant(queue, "creator", *parts, options=options)
            secured.create("queue", "create", queue)
            yield secured
        finally:
            secured.close()

    def close(self) -> None:
        """End it."""
        self.broker.close()

    def create(self, *command: str) -> None:
        """Run a command that creates topics with one partition, as the user `creator`."""
        made = self.kmq("creator", *command, "--partitions", "1")
        assert made.exit_code == 0, made.output

    def credentials(self, part: str) -> dict[str, str]:
        """Return the client settings of a part's user, for librdkafka."""
        return {
            "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": part,
            "sasl.password": _password(part),
        }  # fmt: skip

    def properties(self, part: str) -> Path:
        """Return a file with them, as Kafka's own tools take it."""
        file = self.folder / f"{part}.properties"
        login = f'{LOGIN} username="{part}" password="{_password(part)}";'
        file.write_text(f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config={login}\n")
        file.chmod(0o600)
        return file

    def kmq(self, part: str, *arguments: str) -> Result:
        """Run a command in this process as the user of a part."""
        connection = ("--bootstrap-server", self.bootstrap_servers, "--command-config", str(self.properties(part)))
        return CliRunner().invoke(app, [*arguments, *connection], prog_name="kmq")

    def grant(self, queue: str, *parts: str, options: tuple[str, ...] = ()) -> None:
        """Apply what `kmq acls -o json` lists for some parts."""
        wanted = [word for part in parts for word in ("--part", part)]
        grants: list[dict[str, Any]] = json.loads(
            CliRunner().invoke(app, ["acls", queue, "-o", "json", *wanted, *options]).stdout
        )
        bindings = [
            AclBinding(
                RESOURCES[grant["resource"]], grant["name"],
                ResourcePatternType.PREFIXED if grant["is_prefix"] else ResourcePatternType.LITERAL,
                f"User:{grant['part']}", "*", OPERATIONS[operation], AclPermissionType.ALLOW,
            )
            for grant in grants
            for operation in grant["operations"]
        ]  # fmt: skip
        for future in self.admin.create_acls(bindings).values():
            future.result(timeout=20)

    def grant_by_kafka_acls(self, queue: str, part: str) -> None:
        """Run the commands that `kmq acls` prints for a part, with Kafka's own tool."""
        printed = CliRunner().invoke(app, ["acls", queue, "--part", part, "--principal", "User:{part}"]).stdout
        known = {"$BOOTSTRAP": self.broker.bootstrap_servers, "$ADMIN": str(self.folder / "admin.properties")}
        (self.folder / "admin.properties").write_text("")
        class_path = os.pathsep.join(map(str, jar_paths("broker")))
        for line in printed.splitlines():
            if line.startswith("#"):
                continue
            program, *words = shlex.split(line)
            assert program == "kafka-acls.sh"
            tool = [str(find_java()), "-Xmx128m", "-cp", class_path, "org.apache.kafka.tools.AclCommand"]
            command = [*tool, *(known.get(word, word) for word in words)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENDS_S)
            assert done.returncode == 0, done.stdout + done.stderr


def _password(part: str) -> str:
    return f"password-of-{part}"
