"""Faults of the network: cut between consumers and broker, between tracker and broker, and slow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from faults.on_brokers import BROKER_STALL_MS
from faults.on_trackers import recover
from faults.proxy import ProxiedBroker

if TYPE_CHECKING:
    from faults.campaign import Campaign
    from faults.stage import Stage

CUT_S = 30.0
SHORT_CUT_S = 8.0
REJOIN_S = 5.0
LATENCY_S = 0.1
"""In each direction."""

SLOW_P99_MS = 12_000
"""I8 while each request of the tracker takes 0.2 s: a batch makes about twenty of them, and a message waits for two."""


def cut(campaign: Campaign) -> Stage:
    """F18: the network cut for 30 s between consumers and broker, tracker and broker, all; then 200 ms slower."""
    broker, workers, trackers = ProxiedBroker.start(campaign.folder, campaign.broker_environment)
    stage = campaign.stage("f18", broker)
    stage.judge(stall_ms=BROKER_STALL_MS, quiet_p99_ms=SLOW_P99_MS)
    try:
        recover(stage, stage.tracker(bootstrap_servers=trackers.address))
        stage.send(rate=campaign.rate(100))
        for number in range(2):
            stage.worker(f"crew-{number}", bootstrap_servers=workers.address).wait_working()
        seconds = SHORT_CUT_S + (CUT_S - SHORT_CUT_S) * min(1.0, campaign.scale)
        cuts = {"consumers": (workers,), "tracker": (trackers,), "all": (workers, trackers)}
        for what, proxies in cuts.items():
            time.sleep(3)
            # A consumer that has lost its place in the group may write STARTs before it learns of that.
            with stage.away(after_s=REJOIN_S):
                for proxy in proxies:
                    proxy.cut()
                time.sleep(seconds)
                for proxy in proxies:
                    proxy.heal()
            stage.injected("network cut", between=what, seconds=seconds)
        for proxy in (workers, trackers):
            proxy.delay(LATENCY_S)
        stage.injected("network slow", seconds=LATENCY_S)
        time.sleep(seconds)
        stage.drain()
    finally:
        # The stage's processes end first: without a network they would not end by themselves.
        stage.on_close(workers.close)
        stage.on_close(trackers.close)
    return stage
