-- Each lease: who held which message from when to when, how it ended, and what became of the message then.
--
-- outcome    how it ended: ACKED, REJECTED, EXPIRED (its time to live was over); FAILED (the handler raised),
--            RELEASED (given back), RETURNED (given back unseen), LEASE_EXPIRED (nobody said anything);
--            DEFERRED (not handed out: a delayed send); TAKEN_OVER (started again while it ran); IN_FLIGHT.
-- settled_as the END that the tracker goes by, the first after the START; null while there is none.
-- held_ms    from the START to the word that ended it; to the deadline where there was none.
WITH numbered AS (
  SELECT *,
    count_if(kind = 'START') OVER so_far AS lease_number,
    -- Whether a lease was open when this marker came: a late END, a KEEPALIVE after the END do not count.
    coalesce(
      last_value(CASE WHEN kind IN ('START', 'END') THEN kind END, true) OVER before = 'START', false
    ) AS is_open
  FROM marker_events
  WINDOW
    so_far AS (
      PARTITION BY queue, group_name, queue_partition, message_offset, marker_partition
      ORDER BY marker_offset ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ),
    before AS (
      PARTITION BY queue, group_name, queue_partition, message_offset, marker_partition
      ORDER BY marker_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
),
leases AS (
  SELECT
    queue, group_name, queue_partition, message_offset, marker_partition, lease_number,
    min_by(struct(appended_at, consumer_id, delivery_count, never_handed_out, marker_offset), marker_offset)
      FILTER (WHERE kind = 'START') AS started,
    min_by(struct(appended_at, release, never_handed_out, reason), marker_offset)
      FILTER (WHERE is_release) AS released,
    min_by(struct(appended_at, outcome, reason, consumer_id), marker_offset)
      FILTER (WHERE kind = 'END') AS ended,
    max_by(deadline_at, marker_offset) FILTER (WHERE kind <> 'END') AS deadline_at,
    count_if(kind = 'KEEPALIVE' AND NOT is_release) AS renewals
  FROM numbered
  WHERE lease_number > 0 AND (kind = 'START' OR is_open)
  GROUP BY queue, group_name, queue_partition, message_offset, marker_partition, lease_number
),
followed AS (
  SELECT *,
    lead(started.appended_at) OVER (
      PARTITION BY queue, group_name, queue_partition, message_offset, marker_partition ORDER BY lease_number
    ) AS next_started_at
  FROM leases
),
named AS (
  SELECT *,
    CASE
      WHEN ended IS NULL AND next_started_at IS NOT NULL THEN 'TAKEN_OVER'
      WHEN started.never_handed_out THEN 'DEFERRED'
      WHEN ended.outcome IN ('ACKED', 'REJECTED', 'EXPIRED') THEN ended.outcome
      WHEN released.never_handed_out THEN 'RETURNED'
      WHEN released.release = 'FAILED' THEN 'FAILED'
      WHEN released IS NOT NULL THEN 'RELEASED'
      WHEN ended IS NOT NULL THEN 'LEASE_EXPIRED'
      ELSE 'IN_FLIGHT'
    END AS outcome
  FROM followed
),
timed AS (
  SELECT *,
    CASE
      WHEN outcome = 'TAKEN_OVER' THEN next_started_at
      WHEN outcome = 'LEASE_EXPIRED' THEN deadline_at
      WHEN outcome IN ('RETURNED', 'FAILED', 'RELEASED') THEN released.appended_at
      WHEN outcome <> 'IN_FLIGHT' THEN ended.appended_at
    END AS ended_at
  FROM named
)
SELECT
  queue, group_name, queue_partition, message_offset, started.delivery_count AS delivery_count,
  started.consumer_id AS consumer_id,
  started.appended_at AS started_at,
  deadline_at,
  ended_at,
  outcome,
  unix_millis(ended_at) - unix_millis(started.appended_at) AS held_ms,
  renewals,
  coalesce(ended.reason, released.reason) AS reason,
  ended.outcome AS settled_as,
  ended.appended_at AS settled_at,
  ended.consumer_id AS settled_by,
  CASE
    WHEN ended.outcome IN ('REDELIVERED', 'DEAD_LETTERED') AND outcome <> 'REJECTED'
    THEN unix_millis(ended.appended_at) - unix_millis(deadline_at)
  END AS late_ms,
  lease_number, started.marker_offset AS start_marker_offset, marker_partition
FROM timed
