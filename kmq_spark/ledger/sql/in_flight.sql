-- Messages that are started and not ended, each with its newest lease, according to the markers in the ledger.
SELECT
  d.queue, d.group_name, d.queue_partition, d.message_offset, d.consumer_id, d.delivery_count, d.outcome,
  d.started_at, d.deadline_at,
  unix_millis(current_timestamp) - unix_millis(d.started_at) AS age_ms,
  unix_millis(current_timestamp) - unix_millis(d.deadline_at) AS overdue_ms
FROM deliveries AS d
WHERE d.settled_as IS NULL AND d.outcome <> 'TAKEN_OVER'
