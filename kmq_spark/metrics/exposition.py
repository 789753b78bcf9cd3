"""
Serve samples over HTTP in the Prometheus format.

Rule 1: Only this module imports `prometheus-client`, and only if a port is set: producers and consumers do not need it.
Rule 2: The server listens on loopback unless the operator sets another address, because the page contains queue names.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kmq_spark.errors import ConfigError
from kmq_spark.metrics.names import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kmq_spark.metrics.samples import Histogram, Sample

    Read = Callable[[], Iterable[Sample]]
    ReadHistograms = Callable[[], Iterable[tuple[tuple[str, ...], Histogram]]]

LOOPBACK = "127.0.0.1"


class MetricsServer:
    """
    An HTTP server: `/metrics`, and `/health` and `/ready` (200 and `ok`, or 503 and the problem).

    The functions are called at each request, in the server's own threads: *read* returns all samples except the
    histograms, *read_lateness* the histograms by queue, *health* the problem, if any. Port 0 is a free one, see `port`.
    Without *read* it serves the default registry of `prometheus_client`, with what this process counts in it.
    """

    def __init__(
        self,
        port: int,
        host: str,
        read: Read | None,
        read_lateness: ReadHistograms = tuple,
        health: Callable[[], str] = str,
    ) -> None:
        try:
            from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app  # noqa: PLC0415  # rule 1
            from prometheus_client.exposition import ThreadingWSGIServer  # noqa: PLC0415  # rule 1
        except ImportError as error:
            raise ConfigError(
                "metrics need the package prometheus-client, which is not installed; run "
                "`pip install 'kmq-spark[metrics]'`, or leave the metrics port out"
            ) from error
        registry = REGISTRY
        if read is not None:
            registry = CollectorRegistry()
            registry.register(_Collector(read, read_lateness))
        app = _routed(make_wsgi_app(registry), health)
        try:
            family = socket.getaddrinfo(host, port)[0][0]  # IPv4 or IPv6
            server = type("Server", (ThreadingWSGIServer,), {"address_family": family})
            self._server: WSGIServer = make_server(host, port, app, server, _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics: got {host!r} port {port!r}: {getattr(error, 'strerror', None) or error}; "
                "choose another address or port"
            ) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="kmq-metrics-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(WSGIRequestHandler):
    """A request handler that does not log requests."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the base class
        """Write nothing."""


def _routed(metrics: Any, health: Callable[[], str]) -> Any:  # noqa: ANN401  # WSGI applications
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:  # noqa: ANN401  # as above
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            return metrics(environ, start_response)
        if path in {"/health", "/ready"}:
            wrong = health()
            status, text = ("503 Service Unavailable", wrong) if wrong else ("200 OK", "ok")
        else:
            status, text = "404 Not Found", "not found: /metrics and /health are here"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return answer


class _Collector:
    """Converts samples to metric families of `prometheus-client`."""

    def __init__(self, read: Read, read_lateness: ReadHistograms) -> None:
        self._read = read
        self._read_lateness = read_lateness
        self._lock = threading.Lock()

    def describe(self) -> list[Any]:
        """Return nothing: otherwise a registry requests samples while a tracker is still starting."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield each family once. Samples with the same labels are summed."""
        from prometheus_client.core import (  # noqa: PLC0415  # rule 1 of the module
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        values: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        with self._lock:
            for name, labels, value in self._read():
                values[name][labels] += value
            histograms = list(self._read_lateness())
        for name, metric in METRICS.items():
            if name == "kmq_redelivery_lateness_seconds":
                family: Any = HistogramMetricFamily(name, metric.meaning, labels=metric.labels)
                for labels, histogram in histograms:
                    family.add_metric(labels, histogram.cumulative(), histogram.total)
                if histograms:
                    yield family
            elif name in values:
                family = kinds[metric.kind](name, metric.meaning, labels=metric.labels)
                for labels, value in values[name].items():
                    family.add_metric(labels, value)
                yield family
