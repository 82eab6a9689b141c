"""Prometheus metrics of the completion server: its state and latencies, and `nsa_sel.counters()`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from batch_scheduler import Scheduler
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

import nsa_sel

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # bucket bounds of the histograms


class State:
    """Collect the scheduler's state and nsa-sel's counters at each scrape."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[Any]:
        gauges = {
            "requests_running": ("Sequences that hold pages of the cache", len(self.scheduler.running)),
            "requests_waiting": ("Requests without pages", len(self.scheduler.queue.waiting)),
            "cache_pages_free": ("Free pages of the cache", self.scheduler.cache.free_pages),
            "prefixes_kept": ("Sequences kept for texts with the same prefix", len(self.scheduler.prefixes.kept)),
        }
        counters = {
            "preempted": ("Sequences that released their pages for older ones", self.scheduler.preempted),
            "prefix_hits": ("Sequences that started with pages of another one", self.scheduler.prefixes.hits),
            "prefix_tokens": ("Bytes that were not prefilled because of a shared prefix", self.scheduler.prefixes.saved),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"nsa_serve_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"nsa_serve_{name}", text, value)
        calls = CounterMetricFamily("nsa_sel_counters", "nsa_sel.counters()", labels=["name"])
        for name, number in nsa_sel.counters().items():
            calls.add_metric([name], number)
        yield calls


class Metrics:
    """The metrics of one server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(State(scheduler))
        options: Any = {"registry": self.registry}
        self.ended = Counter("nsa_serve_requests", "Requests by outcome", ["outcome"], **options)
        self.prompt_tokens = Counter("nsa_serve_prompt_tokens", "Bytes of accepted prompts", **options)
        self.tokens = Counter("nsa_serve_generated_tokens", "Bytes of completions", **options)
        self.first = Histogram("nsa_serve_time_to_first_token_seconds", "Time from a request to its first byte", buckets=SECONDS, **options)
        self.between = Histogram("nsa_serve_time_between_tokens_seconds", "Time between bytes", buckets=SECONDS, **options)


class Stopwatch:
    """Measure the times between the bytes of one completion."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.last, self.histogram = metrics, time.perf_counter(), metrics.first

    def token(self) -> None:
        """Record a byte."""
        now = time.perf_counter()
        self.histogram.observe(now - self.last)
        self.metrics.tokens.inc()
        self.last, self.histogram = now, self.metrics.between
