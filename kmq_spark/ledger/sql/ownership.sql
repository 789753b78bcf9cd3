-- Claims of coordination groups, one row each: owner, epoch, begin, end, and how it ended.
-- A claim that lapsed ended when 2T had passed without a heartbeat of its owner; the owner itself stopped after T.
WITH claims AS (
  SELECT
    queue, group_name, coordination_group, resource, client_id, epoch, record_offset, change_index, appended_at, change,
    lag(epoch) OVER (
      PARTITION BY coordination_group, resource ORDER BY record_offset, change_index
    ) AS previous_epoch
  FROM {coordination}
  WHERE change IN ('claimed', 'found', 'released', 'lapsed')
),
events AS (
  SELECT
    queue, group_name, coordination_group, resource, client_id, epoch, appended_at, change,
    lead(appended_at) OVER (
      PARTITION BY coordination_group, resource ORDER BY record_offset, change_index
    ) AS until_at,
    lead(change) OVER (
      PARTITION BY coordination_group, resource ORDER BY record_offset, change_index
    ) AS ended_by
  FROM claims
  -- A ledger that was started again may find a claim that it has.
  WHERE change <> 'found' OR previous_epoch IS NULL OR previous_epoch <> epoch
)
SELECT
  queue, group_name, coordination_group, resource, client_id AS owner, epoch, appended_at AS from_at, until_at,
  CASE WHEN ended_by IN ('claimed', 'found') THEN 'replaced' ELSE ended_by END AS ended_by,
  unix_millis(until_at) - unix_millis(appended_at) AS held_ms,
  change = 'claimed' AS is_begin_known
FROM events
WHERE change IN ('claimed', 'found')
ORDER BY coordination_group, resource, epoch
