-- Messages whose deliveries fail repeatedly: the handler raised or rejected, or the lease expired, over all copies.
WITH wrong AS (
  SELECT
    d.queue, d.subscription, m.origin_partition, m.origin_offset,
    count(*) AS deliveries,
    count(*) FILTER (WHERE d.outcome = 'LEASE_EXPIRED') AS silent,
    count(*) FILTER (WHERE d.outcome = 'FAILED') AS failed,
    count(*) FILTER (WHERE d.outcome = 'REJECTED') AS rejected,
    cast(sum(d.held_ms) AS bigint) AS held_ms,
    max_by(d.outcome, d.started_at) AS last_outcome,
    max(d.started_at) AS last_started_at,
    list_sort(list(DISTINCT d.consumer_id) FILTER (d.consumer_id IS NOT NULL)) AS consumers,
    any_value(m.key) AS key
  FROM deliveries AS d
  JOIN messages AS m
    ON m.queue = d.queue AND m.queue_partition = d.queue_partition AND m.message_offset = d.message_offset
  WHERE d.outcome NOT IN ('DEFERRED', 'RETURNED')
  GROUP BY d.queue, d.subscription, m.origin_partition, m.origin_offset
  HAVING silent + failed + rejected > 0
)
SELECT w.*, x.dead_at, x.reason
FROM wrong AS w
LEFT JOIN (
  SELECT queue, subscription, origin_partition, origin_offset, max(dead_at) AS dead_at, max_by(reason, dead_at) AS reason
  FROM dead_letters
  GROUP BY queue, subscription, origin_partition, origin_offset
) AS x
  ON x.queue = w.queue AND x.subscription = w.subscription
  AND x.origin_partition = w.origin_partition AND x.origin_offset = w.origin_offset
ORDER BY w.silent DESC, w.failed DESC, w.deliveries DESC
