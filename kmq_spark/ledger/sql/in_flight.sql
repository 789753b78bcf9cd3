-- Messages that are started and not ended, each with its newest lease, according to the markers in the ledger.
SELECT
  d.queue, d.subscription, d.queue_partition, d.message_offset, d.consumer_id, d.delivery_count, d.outcome,
  d.started_at, d.deadline_at,
  epoch_ms(current_timestamp) - epoch_ms(d.started_at) AS age_ms,
  epoch_ms(current_timestamp) - epoch_ms(d.deadline_at) AS overdue_ms
FROM deliveries AS d
WHERE d.settled_as IS NULL AND d.outcome <> 'TAKEN_OVER'
