-- Redeliveries per hour of their deadline, by cause, and their lateness (append time minus deadline).
SELECT
  queue, group_name, date_trunc('HOUR', deadline_at) AS hour,
  count(*) AS redelivered,
  count_if(outcome = 'LEASE_EXPIRED') AS silent,
  count_if(outcome = 'FAILED') AS failed,
  count_if(outcome IN ('RELEASED', 'RETURNED')) AS given_back,
  count_if(outcome = 'DEFERRED') AS delayed_sends,
  count_if(late_ms < 0) AS early,
  percentile_approx(late_ms, 0.5) AS late_p50_ms,
  percentile_approx(late_ms, 0.99) AS late_p99_ms,
  max(late_ms) AS late_max_ms
FROM deliveries
WHERE settled_as = 'REDELIVERED'
GROUP BY queue, group_name, hour
ORDER BY hour DESC, queue, group_name
