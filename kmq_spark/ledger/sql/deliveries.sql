-- Each lease: its message, its consumer, its start and end, how it ended, and what the tracker did with the message.
--
-- outcome    How the lease ended: ACKED, REJECTED, EXPIRED (the time to live of the message was over), FAILED (the
--            handler raised), RELEASED (by its consumer), RETURNED (released before a handler received the message),
--            LEASE_EXPIRED (no marker before the deadline), DEFERRED (not handed out: a delayed send), TAKEN_OVER
--            (another START before the lease ended), IN_FLIGHT (not ended).
-- settled_as Outcome of the END that the tracker uses, the first one after the START; null if there is none.
-- held_ms    From the START to the marker that ended the lease; to the deadline if no marker did.
WITH numbered AS (
  SELECT *,
    count(*) FILTER (WHERE kind = 'START') OVER so_far AS lease_number,
    -- Whether a lease was open before this marker: a late END and a KEEPALIVE after the END are ignored.
    coalesce(max(CASE WHEN kind = 'START' THEN marker_offset END) OVER before, -1)
      > coalesce(max(CASE WHEN kind = 'END' THEN marker_offset END) OVER before, -1) AS is_open
  FROM marker_events
  WINDOW
    so_far AS (
      PARTITION BY queue, subscription, queue_partition, message_offset, marker_partition
      ORDER BY marker_offset ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ),
    before AS (
      PARTITION BY queue, subscription, queue_partition, message_offset, marker_partition
      ORDER BY marker_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
),
leases AS (
  SELECT
    queue, subscription, queue_partition, message_offset, marker_partition, lease_number,
    -- A lease has one START and at most one END, so `max` returns the value of that marker.
    max(CASE WHEN kind = 'START' THEN appended_at END) AS started_at,
    max(CASE WHEN kind = 'START' THEN marker_offset END) AS start_marker_offset,
    max(CASE WHEN kind = 'START' THEN consumer_id END) AS consumer_id,
    max(CASE WHEN kind = 'START' THEN delivery_count END) AS delivery_count,
    coalesce(max(CASE WHEN kind = 'START' THEN never_handed_out END), false) AS is_deferral,
    max(CASE WHEN kind = 'END' THEN appended_at END) AS settled_at,
    max(CASE WHEN kind = 'END' THEN outcome END) AS settled_as,
    max(CASE WHEN kind = 'END' THEN reason END) AS end_reason,
    max(CASE WHEN kind = 'END' THEN consumer_id END) AS settled_by,
    -- Only the first release is used. `min_by` skips nulls, so no value may be null here.
    min(CASE WHEN is_release THEN appended_at END) AS released_at,
    min_by(release, CASE WHEN is_release THEN marker_offset END) AS release,
    coalesce(min_by(never_handed_out, CASE WHEN is_release THEN marker_offset END), false) AS is_return,
    nullif(min_by(coalesce(reason, ''), CASE WHEN is_release THEN marker_offset END), '') AS release_reason,
    max_by(deadline_at, CASE WHEN kind <> 'END' THEN marker_offset END) AS deadline_at,
    count(*) FILTER (WHERE kind = 'KEEPALIVE' AND NOT is_release) AS renewals
  FROM numbered
  WHERE lease_number > 0 AND (kind = 'START' OR is_open)
  GROUP BY queue, subscription, queue_partition, message_offset, marker_partition, lease_number
),
followed AS (
  SELECT *,
    lead(started_at) OVER (
      PARTITION BY queue, subscription, queue_partition, message_offset, marker_partition ORDER BY lease_number
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
  queue, subscription, queue_partition, message_offset, delivery_count,
  consumer_id,
  started_at,
  deadline_at,
  ended_at,
  outcome,
  epoch_ms(ended_at) - epoch_ms(started_at) AS held_ms,
  renewals,
  coalesce(end_reason, release_reason) AS reason,
  settled_as,
  settled_at,
  settled_by,
  CASE
    WHEN settled_as IN ('REDELIVERED', 'DEAD_LETTERED') AND outcome <> 'REJECTED'
    THEN epoch_ms(settled_at) - epoch_ms(deadline_at)
  END AS late_ms,
  lease_number, start_marker_offset, marker_partition
FROM timed
