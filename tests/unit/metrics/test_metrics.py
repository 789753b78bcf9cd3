"""The metrics: their names and labels, where the numbers come from, and the dashboard and rules that use them."""

from __future__ import annotations

import http.client
import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from kmq_spark.core.decisions import DECISION_DTYPES, Decisions
from kmq_spark.core.outcome import PartitionOutcome
from kmq_spark.core.policy import DecisionAction
from kmq_spark.core.state import Counters, Status
from kmq_spark.errors import ConfigError
from kmq_spark.metrics.exposition import MetricsServer
from kmq_spark.metrics.names import LATENESS_BUCKETS, MAX_PARTITIONS, MAX_QUEUES, METRICS
from kmq_spark.metrics.samples import (
    Histogram,
    Sample,
    TrackerNumbers,
    dead_reason,
    queue_labels,
    samples_of,
)

ROOT = Path(__file__).parents[3]
RULES = ROOT / "conf" / "prometheus" / "kmq-alerts.yml"
DASHBOARD = ROOT / "conf" / "grafana" / "kmq-dashboard.json"


def status(in_flight: int = 0, **counters: int) -> Status:
    """Return a status of a markers partition."""
    return Status(
        10, 0, in_flight, 5, None, {**Counters().to_dict(), **counters}, state_bytes=100, marked=in_flight * 2
    )


def decided(*runs: tuple[DecisionAction, str, bool, int]) -> Decisions:
    """Return decisions: action, reason, whether the lease just ran out, number of messages."""
    columns: dict[str, Any] = dict.fromkeys(DECISION_DTYPES, [0] * len(runs))
    columns["action"] = [int(action) for action, *_ in runs]
    columns["is_silent"] = [is_silent for _, _, is_silent, _ in runs]
    columns["message_count"] = [count for *_, count in runs]
    return Decisions.from_columns(columns, [reason for _, reason, *_ in runs])


def values(numbers: TrackerNumbers, now_s: float = 1_000.0) -> dict[tuple[str, ...], float]:
    """Return the samples of a queue by name and the labels after the queue."""
    return {(each.name, *each.labels[1:]): each.value for each in samples_of("orders", numbers, now_s)}


def test_gauges_are_those_of_the_folded_state() -> None:
    """Another process that finished the work is in them too."""
    numbers = TrackerNumbers()
    numbers.statuses = {0: status(3, started=9, renewed=1, acked=4, unreadable=1), 1: status(2, started=5, acked=3)}
    found = values(numbers)
    assert found["kmq_messages_in_flight", "0"] == 3
    assert found["kmq_messages_in_flight", "1"] == 2
    assert (found["kmq_decisions_unconfirmed", "0"], found["kmq_decisions_unconfirmed", "1"]) == (6, 4)
    assert found["kmq_deliveries_total", "tracker"] == 15
    assert found["kmq_acks_total", "tracker"] == 7
    assert found["kmq_markers_unreadable_total",] == 1
    assert found["kmq_tracker_state_bytes",] == 200


def test_reasons_and_lateness_are_counted_batch_by_batch() -> None:
    redeliver, dead = DecisionAction.REDELIVER, DecisionAction.DEAD_LETTER
    decisions = decided(
        (redeliver, "", True, 1), (redeliver, "", True, 70), (redeliver, "", False, 1),
        (dead, "delivery limit reached: 5 of 5", True, 40), (dead, "no such customer 4711", False, 1),
        (dead, "expired: ttl", False, 1),
    )  # fmt: skip
    numbers = TrackerNumbers()
    numbers.add([PartitionOutcome(0, status(), decisions)], [120, 700])
    found = values(numbers)
    assert found["kmq_redeliveries_total", "lease_over"] == 71
    assert found["kmq_redeliveries_total", "given_back"] == 1
    assert {reason: found["kmq_dead_lettered_total", reason] for reason in numbers.dead_lettered} == {
        "delivery_limit": 40, "rejected": 1, "expired": 1,
    }  # fmt: skip
    assert dict(numbers.lateness.cumulative())["0.2"] == 1
    assert numbers.lateness.total == pytest.approx(0.82)


def test_labels_are_few_whatever_a_queue_holds() -> None:
    """Reasons are free text, partitions and queues many: none of them may blow up a Prometheus."""
    assert {dead_reason(f"customer {number}") for number in range(1_000)} == {"rejected"}
    labels = queue_labels([f"queue-{number}" for number in range(MAX_QUEUES + 50)])
    assert len(set(labels.values())) == MAX_QUEUES + 1
    numbers = TrackerNumbers(statuses={partition: status(1) for partition in range(MAX_PARTITIONS + 1)})
    found = [each for each in samples_of("orders", numbers, 0) if each.name == "kmq_messages_in_flight"]
    assert found == [Sample("kmq_messages_in_flight", ("orders", "all"), MAX_PARTITIONS + 1)]


def test_ages_are_absent_where_there_is_nothing() -> None:
    numbers = TrackerNumbers()
    assert not {name for name, *_ in values(numbers) if "age" in name or "timestamp" in name}
    numbers.oldest_ready_at_s, numbers.committed_at_s = 940.0, 990.0
    found = values(numbers)
    assert (found["kmq_oldest_ready_age_seconds",], found["kmq_tracker_last_commit_timestamp_seconds",]) == (60, 990)


def test_every_metric_has_its_name_kind_and_labels() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert set(metric.labels) <= {"queue", "partition", "reason", "error", "component", "group"}, name


def scraped(server: MetricsServer) -> str:
    """Return what a scrape gives."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer:
        return str(answer.read(), "utf-8")


def test_a_scrape_gives_all_families_with_help() -> None:
    histogram = Histogram()
    histogram.observe(0.25)
    read = [Sample("kmq_messages_ready", ("orders",), 4), Sample("kmq_acks_total", ("orders", "worker"), 2)]
    with MetricsServer(0, "127.0.0.1", lambda: read, lambda: [(("orders",), histogram)]) as server:
        text = scraped(server)
    assert "# HELP kmq_messages_ready Messages that no consumer has started." in text
    assert 'kmq_messages_ready{queue="orders"} 4.0' in text
    assert 'kmq_acks_total{component="worker",queue="orders"} 2.0' in text
    assert 'kmq_redelivery_lateness_seconds_bucket{le="0.3",queue="orders"} 1.0' in text
    assert text.count("kmq_redelivery_lateness_seconds_bucket") == len(LATENESS_BUCKETS) + 1
    assert "python_" not in text  # only ours


def test_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cannot serve metrics: got '127.0.0.1' port {port}: .*; choose another"
        ):
            MetricsServer(port, "127.0.0.1", list)


def expressions() -> list[tuple[str, str]]:
    """Return every PromQL expression of the shipped files, with its place; Grafana's variables put in."""
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    found = [(rule["alert"], rule["expr"]) for group in rules for rule in group["rules"]]
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$queue", "orders")
            found.append((panel["title"], text))
    return found


@pytest.mark.parametrize(("place", "expression"), expressions())
def test_every_expression_parses_and_names_metrics_that_exist(place: str, expression: str) -> None:
    """With the labels that they have."""
    promql_parser.parse(expression)
    names = re.findall(r"\bkmq_[a-z_]+", expression)
    assert names, place
    for name in names:
        metric = METRICS[re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name)]
        assert (metric.kind == "histogram") == name.endswith(("_bucket", "_sum", "_count")), name
        for labels in re.findall(rf"{name}\{{([^}}]*)\}}", expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", labels)) <= set(metric.labels), (place, name)


def test_dashboard_shows_every_metric_and_every_alert_says_what_to_do() -> None:
    shown = " ".join(expression for _, expression in expressions())
    assert [name for name in METRICS if name not in shown] == []
    for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
            assert rule["labels"]["severity"] in {"page", "warn"}


def test_counters_are_asked_for_their_rate_alone() -> None:
    """The value of a counter depends on when its process began."""
    for place, expression in expressions():
        for name, metric in METRICS.items():
            if metric.kind == "counter" and name in expression:
                assert re.search(rf"(rate|increase)\({name}", expression), place


def answer(server: MetricsServer, path: str) -> tuple[int, str]:
    """Return status and text of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_health_says_what_is_wrong_and_no_other_path_answers() -> None:
    wrong = ["tracker of orders has not committed for 23 s", ""]
    with MetricsServer(0, "127.0.0.1", list, health=wrong.pop) as server:
        assert answer(server, "/health") == (200, "ok\n")
        assert answer(server, "/health") == (503, "tracker of orders has not committed for 23 s\n")
        assert answer(server, "/metrics")[0] == 200
        assert [answer(server, path)[0] for path in ("/", "/metrics/x", "/healthz", "/favicon.ico")] == [404] * 4
