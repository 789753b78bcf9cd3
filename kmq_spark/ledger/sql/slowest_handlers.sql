-- Consumers by the duration of their handlers, from the deliveries that a handler acknowledged, rejected or failed.
SELECT
  queue, subscription, consumer_id,
  count(*) AS handled,
  count(*) FILTER (WHERE outcome = 'FAILED') AS failed,
  quantile_disc(held_ms, 0.5) AS p50_ms,
  quantile_disc(held_ms, 0.99) AS p99_ms,
  max(held_ms) AS max_ms,
  max_by(concat(queue_partition, ':', message_offset), held_ms) AS slowest_message,
  max(ended_at) AS last_seen_at
FROM deliveries
WHERE outcome IN ('ACKED', 'REJECTED', 'FAILED')
GROUP BY queue, subscription, consumer_id
ORDER BY p99_ms DESC, max_ms DESC
