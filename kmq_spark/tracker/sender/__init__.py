"""Sending what the tracker has decided, in Kafka transactions."""
