-- Redeliveries per hour of their deadline, by cause, and their lateness (append time minus deadline).
SELECT
  queue, subscription, date_trunc('HOUR', deadline_at) AS hour,
  count(*) AS redelivered,
  count(*) FILTER (WHERE outcome = 'LEASE_EXPIRED') AS silent,
  count(*) FILTER (WHERE outcome = 'FAILED') AS failed,
  count(*) FILTER (WHERE outcome IN ('RELEASED', 'RETURNED')) AS given_back,
  count(*) FILTER (WHERE outcome = 'DEFERRED') AS delayed_sends,
  count(*) FILTER (WHERE late_ms < 0) AS early,
  quantile_disc(late_ms, 0.5) AS late_p50_ms,
  quantile_disc(late_ms, 0.99) AS late_p99_ms,
  max(late_ms) AS late_max_ms
FROM deliveries
WHERE settled_as = 'REDELIVERED'
GROUP BY queue, subscription, hour
ORDER BY hour DESC, queue, subscription
