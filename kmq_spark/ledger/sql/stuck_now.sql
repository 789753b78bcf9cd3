-- Messages in flight past their deadline (check the tracker) or held for more than an hour (check the handler).
SELECT
  f.queue, f.subscription, f.queue_partition, f.message_offset, f.consumer_id, f.delivery_count,
  CASE WHEN f.overdue_ms > 5000 THEN 'past its deadline' ELSE 'held for long' END AS why,
  f.age_ms, f.overdue_ms, f.started_at, f.deadline_at,
  m.first_sent_at, m.key,
  r.read_to AS ledger_read_to
FROM in_flight AS f
LEFT JOIN messages AS m
  ON m.queue = f.queue AND m.queue_partition = f.queue_partition AND m.message_offset = f.message_offset
LEFT JOIN (SELECT queue, subscription, max(appended_at) AS read_to FROM markers GROUP BY queue, subscription) AS r
  ON r.queue = f.queue AND r.subscription = f.subscription
WHERE f.overdue_ms > 5000 OR (f.age_ms > 3600000 AND f.outcome <> 'DEFERRED')
ORDER BY f.age_ms DESC
