-- All events of a message, over all its copies. Select one message by the position of its first copy:
-- WHERE queue = … AND origin_partition = … AND origin_offset = … ORDER BY event_at, message_offset, step.
WITH sent AS (
  SELECT
    queue, for_subscription AS subscription, origin_partition, origin_offset, queue_partition, message_offset,
    sent_at AS event_at, 0 AS step,
    CASE WHEN is_first_copy THEN 'sent' WHEN previous_offset IS NULL THEN 'redriven' ELSE 'sent again' END AS event,
    delivery_count, NULL AS who,
    concat_ws(
      ', ',
      value_bytes || ' bytes',
      'key ' || key,
      'by ' || producer_id || ', sequence ' || producer_sequence || ', generation ' || producer_generation,
      'for queue ' || logical_queue,
      'not before ' || strftime(not_before, '%Y-%m-%d %H:%M:%S.%g'),
      'delayed by ' || delay_ms || ' ms',
      'time to live ' || ttl_ms || ' ms'
    ) AS detail
  FROM messages
),
marked AS (
  SELECT
    m.queue, k.subscription, m.origin_partition, m.origin_offset, m.queue_partition, m.message_offset,
    k.appended_at AS event_at,
    CASE k.kind WHEN 'START' THEN 1 WHEN 'KEEPALIVE' THEN 2 ELSE 3 END AS step,
    k.event,
    k.delivery_count,
    k.consumer_id AS who,
    concat_ws(
      ', ',
      k.reason,
      CASE WHEN k.kind <> 'END' THEN 'for ' || k.redeliver_after_ms || ' ms' END,
      'until ' || strftime(k.due_at, '%Y-%m-%d %H:%M:%S.%g')
    ) AS detail
  FROM messages AS m
  JOIN markers AS k
    ON k.queue = m.queue AND k.queue_partition = m.queue_partition
    AND m.message_offset BETWEEN k.first_offset AND k.first_offset + k.message_count - 1
),
dead AS (
  SELECT
    queue, subscription, origin_partition, origin_offset,
    source_partition AS queue_partition, source_offset AS message_offset,
    dead_at AS event_at, 4 AS step, 'dead letter' AS event, delivery_count, NULL AS who,
    concat_ws(', ', reason, 'at ' || dead_letter_partition || ':' || dead_letter_offset) AS detail
  FROM dead_letters
)
SELECT * FROM sent
UNION ALL SELECT * FROM marked
UNION ALL SELECT * FROM dead
