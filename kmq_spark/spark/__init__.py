"""The only importer of pyspark and pandas: source, state function, session; knows no Kafka client."""
