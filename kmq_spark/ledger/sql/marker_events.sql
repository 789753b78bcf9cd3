-- One row per marker and message: a marker of 500 messages is 500 rows. Unreadable records are left out.
SELECT
  queue, subscription, marker_partition, marker_offset, appended_at, kind,
  queue_partition, unnest(generate_series(first_offset, first_offset + message_count - 1)) AS message_offset,
  redeliver_after_ms, due_at, delivery_count, outcome, reason, release, never_handed_out, consumer_id,
  kind = 'KEEPALIVE' AND (release <> 'RENEWED' OR never_handed_out OR redeliver_after_ms = 0) AS is_release,
  greatest(make_timestamptz((epoch_ms(appended_at) + redeliver_after_ms) * 1000), due_at) AS deadline_at
FROM markers
WHERE error IS NULL
