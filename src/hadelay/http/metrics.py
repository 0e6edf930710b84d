"""Prometheus exposition from plain numbers.

Nothing is counted through prometheus-client: an int on an object costs a twentieth of a labelled counter. The
collector turns what the service and the HTTP layer counted into families when somebody scrapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hadelay.server.api import Histogram, Service
from hadelay.version import VERSION


class Metrics(Collector):
    def __init__(self, service: Service) -> None:
        self.service = service
        #: (route, status) → answers
        self.requests: Counter[tuple[str, int]] = Counter()
        #: name → number, as of now; the HTTP server adds its own
        self.gauges: dict[str, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        view = self.service.metrics()
        for name, value in (*view.values.items(), *self.gauges.items()):
            yield _number(name, None, {"": value})
        for name, (label, values) in view.labelled.items():
            yield _number(name, label, values)
        for name, histogram in view.histograms.items():
            yield _histogram(name, histogram)
        info = GaugeMetricFamily("hadelay_build_info", "The version that runs", labels=["version", "node"])
        info.add_metric([VERSION, self.service.node], 1)
        yield info
        requests = CounterMetricFamily("hadelay_http_requests", "Answers by route and status", labels=["route", "code"])
        for (route, status), count in sorted(self.requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests


def _number(name: str, label: str | None, values: dict[str, float]) -> Metric:
    full = f"hadelay_{name}"
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(full.removesuffix("_total"), _words(name), labels=[label] if label else [])
    for text, value in values.items():
        family.add_metric([text] if label else [], value)
    return family


def _histogram(name: str, histogram: Histogram) -> Metric:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(f"hadelay_{name}", _words(name), buckets=buckets, sum_value=histogram.sum)


def _words(name: str) -> str:
    return name.removesuffix("_total").replace("_", " ")
