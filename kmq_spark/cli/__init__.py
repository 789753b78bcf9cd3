"""The `kmq` command: noun, then verb, with Kafka's manners."""
