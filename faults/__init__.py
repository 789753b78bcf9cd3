"""
The fault campaign: what is promised about redelivery, tried by breaking things while messages flow.

    python -m faults.run            (make faults)

Workloads and injectors write what they meant to do and what came of it into event files; an offline checker reads the
topics themselves and those files, and no process's counters. See docs/internals/faults.md.
"""
