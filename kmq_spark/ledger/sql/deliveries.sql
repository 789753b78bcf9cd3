-- Each lease: who held which message from when to when, how it ended, and what became of the message then.
--
-- outcome    how it ended: ACKED, REJECTED, EXPIRED (its time to live was over); FAILED (the handler raised),
--            RELEASED (given back), RETURNED (given back unseen), LEASE_EXPIRED (no word before the deadline);
--            DEFERRED (not handed out: a delayed send); TAKEN_OVER (started again while it ran); IN_FLIGHT.
-- settled_as the END that the tracker goes by, the first after the START; null while there is none.
-- held_ms    from the START to the word that ended it; to the deadline where there was none.
WITH numbered AS (
  SELECT *,
    count_if(kind = 'START') OVER so_far AS lease_number,
    -- Whether a lease was open when this marker came: a late END, a KEEPALIVE after the END do not count.
    coalesce(max(CASE WHEN kind = 'START' THEN marker_offset END) OVER before, -1)
      > coalesce(max(CASE WHEN kind = 'END' THEN marker_offset END) OVER before, -1) AS is_open
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
    -- A lease has one START and at most one END, so `max` takes the value of that one.
    max(CASE WHEN kind = 'START' THEN appended_at END) AS started_at,
    max(CASE WHEN kind = 'START' THEN marker_offset END) AS start_marker_offset,
    max(CASE WHEN kind = 'START' THEN consumer_id END) AS consumer_id,
    max(CASE WHEN kind = 'START' THEN delivery_count END) AS delivery_count,
    coalesce(max(CASE WHEN kind = 'START' THEN never_handed_out END), false) AS is_deferral,
    max(CASE WHEN kind = 'END' THEN appended_at END) AS settled_at,
    max(CASE WHEN kind = 'END' THEN outcome END) AS settled_as,
    max(CASE WHEN kind = 'END' THEN reason END) AS end_reason,
    max(CASE WHEN kind = 'END' THEN consumer_id END) AS settled_by,
    -- The first release counts. Engines differ in what min_by makes of a value that is null: none is.
    min(CASE WHEN is_release THEN appended_at END) AS released_at,
    min_by(release, CASE WHEN is_release THEN marker_offset END) AS release,
    coalesce(min_by(never_handed_out, CASE WHEN is_release THEN marker_offset END), false) AS is_return,
    nullif(min_by(coalesce(reason, ''), CASE WHEN is_release THEN marker_offset END), '') AS release_reason,
    max_by(deadline_at, CASE WHEN kind <> 'END' THEN marker_offset END) AS deadline_at,
    count_if(kind = 'KEEPALIVE' AND NOT is_release) AS renewals
  FROM numbered
  WHERE lease_number > 0 AND (kind = 'START' OR is_open)
  GROUP BY queue, group_name, queue_partition, message_offset, marker_partition, lease_number
),
followed AS (
  SELECT *,
    lead(started_at) OVER (
      PARTITION BY queue, group_name, queue_partition, message_offset, marker_partition ORDER BY lease_number
    ) AS next_started_at
  FROM leases
),
named AS (
  SELECT *,
    CASE
      WHEN settled_at IS NULL AND next_started_at IS NOT NULL THEN 'TAKEN_OVER'
      WHEN is_deferral THEN 'DEFERRED'
      WHEN settled_as IN ('ACKED', 'REJECTED', 'EXPIRED') THEN settled_as
      WHEN is_return THEN 'RETURNED'
      WHEN release = 'FAILED' THEN 'FAILED'
      WHEN released_at IS NOT NULL THEN 'RELEASED'
      WHEN settled_at IS NOT NULL THEN 'LEASE_EXPIRED'
      ELSE 'IN_FLIGHT'
    END AS outcome
  FROM followed
),
timed AS (
  SELECT *,
    CASE
      WHEN outcome = 'TAKEN_OVER' THEN next_started_at
      WHEN outcome = 'LEASE_EXPIRED' THEN deadline_at
      WHEN outcome IN ('RETURNED', 'FAILED', 'RELEASED') THEN released_at
      WHEN outcome <> 'IN_FLIGHT' THEN settled_at
    END AS ended_at
  FROM named
)
SELECT
  queue, group_name, queue_partition, message_offset, delivery_count,
  consumer_id,
  started_at,
  deadline_at,
  ended_at,
  outcome,
  unix_millis(ended_at) - unix_millis(started_at) AS held_ms,
  renewals,
  coalesce(end_reason, release_reason) AS reason,
  settled_as,
  settled_at,
  settled_by,
  CASE
    WHEN settled_as IN ('REDELIVERED', 'DEAD_LETTERED') AND outcome <> 'REJECTED'
    THEN unix_millis(settled_at) - unix_millis(deadline_at)
  END AS late_ms,
  lease_number, start_marker_offset, marker_partition
FROM timed
