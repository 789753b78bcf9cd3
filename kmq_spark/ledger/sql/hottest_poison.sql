-- Messages whose deliveries fail repeatedly: the handler raised or rejected, or the lease expired, over all copies.
WITH wrong AS (
  SELECT
    d.queue, d.group_name, m.origin_partition, m.origin_offset,
    count(*) AS deliveries,
    count_if(d.outcome = 'LEASE_EXPIRED') AS silent,
    count_if(d.outcome = 'FAILED') AS failed,
    count_if(d.outcome = 'REJECTED') AS rejected,
    cast(sum(d.held_ms) AS bigint) AS held_ms,
    max_by(d.outcome, d.started_at) AS last_outcome,
    max(d.started_at) AS last_started_at,
    array_sort(collect_set(d.consumer_id)) AS consumers,
    any_value(cast(m.key AS string)) AS key
  FROM deliveries AS d
  JOIN {messages} AS m
    ON m.queue = d.queue AND m.queue_partition = d.queue_partition AND m.message_offset = d.message_offset
  WHERE d.outcome NOT IN ('DEFERRED', 'RETURNED')
  GROUP BY d.queue, d.group_name, m.origin_partition, m.origin_offset
  HAVING silent + failed + rejected > 0
)
SELECT w.*, x.dead_at, x.reason
FROM wrong AS w
LEFT JOIN (
  SELECT queue, group_name, origin_partition, origin_offset, max(dead_at) AS dead_at, max_by(reason, dead_at) AS reason
  FROM {dead_letters}
  WHERE NOT is_marker
  GROUP BY queue, group_name, origin_partition, origin_offset
) AS x
  ON x.queue = w.queue AND x.group_name = w.group_name
  AND x.origin_partition = w.origin_partition AND x.origin_offset = w.origin_offset
ORDER BY w.silent DESC, w.failed DESC, w.deliveries DESC
