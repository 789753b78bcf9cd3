"""Results and acks in one Kafka transaction."""
