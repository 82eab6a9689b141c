"""The counters of `nsa_sel.counters` for Prometheus, read at each scrape. Needs the extra `prometheus`.

from nsa_sel.telemetry import prometheus
prometheus.register()  # with prometheus_client's own registry, which its exporters serve
print(prometheus.text())
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from nsa_sel.errors import needs_extra
from nsa_sel.telemetry import events

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric


class Described(NamedTuple):
    """The metric of one kind of counter: its name, its help, and its labels."""

    metric: str
    help: str
    labels: tuple[str, ...]


METRICS = {  # kind of `events.tallies` -> metric; Prometheus adds _total to the names
    "calls": Described("nsa_sel_calls", "Forward passes by the chosen backend", ("backend",)),
    "backward": Described("nsa_sel_backward_passes", "Backward passes by the backend that ran", ("backend",)),
    "forced": Described("nsa_sel_forced_calls", "Calls with a backend forced by name, by what forced it", ("source",)),
    "refused": Described("nsa_sel_refusals", "Calls in which a check refused a preferred backend", ("backend", "code")),
    "unserved": Described("nsa_sel_unserved_calls", "Calls that no backend may run", ()),
    "failed": Described("nsa_sel_failures", "Exceptions in a backend", ("backend",)),
    "warmups": Described("nsa_sel_warmups", "Requests that were warmed up, by the backend that ran forward", ("backend",)),
    "bytes": Described("nsa_sel_moved_bytes", "Estimated bytes moved by passes that were debugged or timed", ("backend", "direction")),
    "flops": Described("nsa_sel_flops", "Estimated FLOPs of passes that were debugged or timed", ("backend", "direction")),
    "fallbacks": Described("nsa_sel_fallbacks", "Passes that packed SDPA ran in place of a backend", ("backend", "reason")),
}


class NsaSelCollector:
    """A collector for prometheus_client. It stores no numbers: each scrape reads `events.tallies`."""

    def collect(self) -> Iterator[Metric]:
        """One counter per kind, with a sample for each label. A kind that is not in METRICS keeps its own name."""
        from prometheus_client.core import CounterMetricFamily

        tallies = events.tallies()
        for kind in (*METRICS, *dict.fromkeys(name[0] for name in tallies if name[0] not in METRICS)):
            found = METRICS.get(kind) or Described(f"nsa_sel_{re.sub(r'[^a-zA-Z0-9_]', '_', kind)}", f"{kind} of nsa-sel", ("name",))
            family = CounterMetricFamily(found.metric, found.help, labels=found.labels)
            for (its_kind, *labels), number in tallies.items():
                if its_kind == kind:
                    family.add_metric(labels if kind in METRICS else [".".join(labels)], number)
            yield family


def register(registry: CollectorRegistry | None = None) -> NsaSelCollector:
    """Add the counters to a registry.

    Args:
        registry: by default prometheus_client's own.

    Returns:
        The collector, which `registry.unregister` takes.

    Raises:
        NsaSelError: where prometheus-client is not installed.
    """
    with needs_extra("prometheus", __name__):
        from prometheus_client import REGISTRY
    collector = NsaSelCollector()
    (REGISTRY if registry is None else registry).register(collector)  # type: ignore[arg-type]
    return collector


def text() -> str:
    """The counters in Prometheus' text format.

    Raises:
        NsaSelError: where prometheus-client is not installed.
    """
    with needs_extra("prometheus", __name__):
        from prometheus_client import CollectorRegistry, generate_latest
    registry = CollectorRegistry()
    register(registry)
    return generate_latest(registry).decode()
