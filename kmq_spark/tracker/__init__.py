"""The redelivery tracker: a Spark query that folds the markers topic, and the parts that supervise and feed it."""
