"""The redelivery tracker: a Spark query that folds the markers topic, and what runs around it."""
