-- Conservation: started = in_flight + acked + rejected + expired + redelivered + dead_lettered + missing; missing is 0.
-- A rejected message counts as rejected, also before its dead letter is written.
WITH leases AS (
  SELECT
    queue, subscription,
    count(*) FILTER (WHERE outcome <> 'TAKEN_OVER') AS started,
    count(*) FILTER (WHERE outcome = 'TAKEN_OVER') AS taken_over,
    count(*) FILTER (WHERE outcome = 'DEFERRED') AS deferred,
    count(*) FILTER (WHERE outcome <> 'TAKEN_OVER' AND settled_as IS NULL) AS in_flight,
    count(*) FILTER (WHERE settled_as = 'ACKED') AS acked,
    count(*) FILTER (WHERE settled_as = 'REJECTED') AS rejected,
    count(*) FILTER (WHERE settled_as = 'EXPIRED') AS expired,
    count(*) FILTER (WHERE settled_as = 'REDELIVERED') AS redelivered,
    count(*) FILTER (WHERE settled_as = 'DEAD_LETTERED') AS dead_lettered
  FROM deliveries
  GROUP BY queue, subscription
),
sent AS (
  SELECT queue, count(*) FILTER (WHERE is_first_copy) AS sent, max(sent_at) AS newest_at FROM messages GROUP BY queue
),
dead AS (
  SELECT queue, subscription, count(*) AS dead_letters
  FROM dead_letters
  GROUP BY queue, subscription
),
marked AS (
  SELECT
    queue, subscription, count(*) FILTER (WHERE error IS NOT NULL) AS unreadable_markers, max(appended_at) AS read_to
  FROM markers
  GROUP BY queue, subscription
)
SELECT
  marked.queue, marked.subscription, coalesce(sent, 0) AS sent, coalesce(started, 0) AS started,
  coalesce(in_flight, 0) AS in_flight, coalesce(acked, 0) AS acked, coalesce(rejected, 0) AS rejected,
  coalesce(expired, 0) AS expired, coalesce(redelivered, 0) AS redelivered,
  coalesce(dead_lettered, 0) AS dead_lettered,
  coalesce(started - in_flight - acked - rejected - expired - redelivered - dead_lettered, 0) AS missing,
  coalesce(taken_over, 0) AS taken_over, coalesce(deferred, 0) AS deferred,
  coalesce(dead_letters, 0) AS dead_letters, unreadable_markers, read_to
FROM marked
LEFT JOIN leases ON leases.queue = marked.queue AND leases.subscription = marked.subscription
LEFT JOIN sent ON sent.queue = marked.queue
LEFT JOIN dead ON dead.queue = marked.queue AND dead.subscription = marked.subscription
ORDER BY marked.queue, marked.subscription
