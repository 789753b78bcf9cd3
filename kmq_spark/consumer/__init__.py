"""The consumer: receive messages, keep their leases, write their markers, run handlers."""
