"""The Spark session of the tracker and of the ledger, and the daemon of its Python workers. Imports no Kafka client."""
