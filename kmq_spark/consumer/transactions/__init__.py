"""Write results and acknowledgements in one Kafka transaction."""
