"""Carry out the tracker's decisions in Kafka transactions."""
