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

from faults.campaign import BROKER_SETTINGS
from kmq_spark.cli.acls import PARTS
from kmq_spark.cli.main import app
from kmq_spark.client_properties import read_client_properties
from kmq_spark.local.cluster import OPERATOR, EmbeddedCluster
from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java
from tests.brokers import end_clients, quick_java
from tests.limits import ENDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

RESOURCES = {
    "topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "transactional-id": ResourceType.TRANSACTIONAL_ID,
}  # fmt: skip
OPERATIONS = {"".join(name.capitalize() for name in each.name.split("_")): each for each in AclOperation}


class SecuredBroker:
    """
    Brokers that refuse what no ACL allows, with TLS, and a user for each part.

    *folder* is for what tests write.
    """

    def __init__(
        self, folder: Path, brokers: int = 1, extra: Mapping[str, str] | None = None, java_options: str = ""
    ) -> None:
        self.folder = folder
        extra = {**(BROKER_SETTINGS if brokers > 1 else {}), **(extra or {})}
        java = {name: f"{value} {java_options}" for name, value in quick_java().items()}
        self.cluster = EmbeddedCluster(brokers, users=PARTS, extra=extra, environment=java).start()
        self.bootstrap_servers, self.properties = self.cluster.bootstrap_servers, self.cluster.properties
        self.admin = AdminClient(
            # It outlives its broker, and would say so on stderr.
            {"bootstrap.servers": self.bootstrap_servers, "log_level": 0, **self.credentials(OPERATOR)}
        )

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
        end_clients()
        self.cluster.close()

    def create(self, *command: str) -> None:
        """Run a command that creates topics with one partition, as the user `creator`."""
        made = self.kmq("creator", *command, "--partitions", "1")
        assert made.exit_code == 0, made.output

    def credentials(self, part: str) -> dict[str, str]:
        """Return the client settings of a part's user, for librdkafka."""
        return read_client_properties(self.properties(part))["extra"]

    def kmq(self, part: str, *arguments: str, given: str | None = None) -> Result:
        """Run a command in this process as the user of a part."""
        words = [*arguments, "--command-config", str(self.properties(part))]
        return CliRunner().invoke(app, words, input=given, prog_name="kmq")

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
        known = {"$BOOTSTRAP": self.bootstrap_servers, "$ADMIN": str(self.properties(OPERATOR))}
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
