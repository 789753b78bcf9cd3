"""Everything needed to run kmq-spark on one machine: Java, the jars, a Kafka broker. Not for production."""

from __future__ import annotations
