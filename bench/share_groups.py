"""
Let a share group begin at the beginning of its topic.

By default it begins at the end, and the setting belongs to the group (KIP-932); librdkafka's admin client has no such
resource type yet, so Kafka's own command sets it, from the broker's locked jars.
"""

from __future__ import annotations

import os
import subprocess

from kmq_spark.local.jars import jar_paths
from kmq_spark.local.java import find_java


def read_from_the_beginning(bootstrap_servers: str, group: str) -> None:
    """Set `share.auto.offset.reset=earliest` on a share group."""
    command = [
        *(str(find_java()), "-Xmx128m", "-cp", os.pathsep.join(map(str, jar_paths("broker")))),
        *("kafka.admin.ConfigCommand", "--bootstrap-server", bootstrap_servers, "--alter"),
        *("--entity-type", "groups", "--entity-name", group, "--add-config", "share.auto.offset.reset=earliest"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
