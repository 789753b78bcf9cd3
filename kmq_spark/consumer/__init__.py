"""The consumer: receives messages, keeps their leases, writes their markers, runs handlers."""
