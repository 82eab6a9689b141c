"""The counters as Prometheus reads them."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from nsa_sel.errors import NsaSelError
from nsa_sel.telemetry import events, prometheus
from tests.helpers.paths import ROOT
from tests.helpers.policy_cases import H100, SHORT, decide

# prometheus-client is optional, and machines with a GPU collect this file too: it is imported where it is needed.


def test_prometheus_text_is_the_counters() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    events.record(decide(SHORT, H100), SHORT)
    events.count("failed", "triton-tile")
    events.count("of a plug-in", "some", "name")
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(prometheus.text())
        for sample in family.samples
    }
    wanted = {}
    for (kind, *labels), number in events.tallies().items():
        known = prometheus.METRICS.get(kind)
        metric = known.metric if known else f"nsa_sel_{re.sub('[^a-z]', '_', kind)}"
        wanted[f"{metric}_total", tuple(labels) if known else (".".join(labels),)] = number
    assert samples == wanted
    assert samples["nsa_sel_refusals_total", ("triton-group", "min-length")] >= 1
    assert samples["nsa_sel_of_a_plug_in_total", ("some.name",)] >= 1


def test_prometheus_reads_at_every_scrape() -> None:
    from prometheus_client import CollectorRegistry

    metrics = CollectorRegistry()
    collector = prometheus.register(metrics)
    found = []
    for _ in range(2):
        events.count("failed", "x")
        found.append(metrics.get_sample_value("nsa_sel_failures_total", {"backend": "x"}))
    assert found[1] == found[0] + 1
    metrics.unregister(collector)


@pytest.mark.parametrize("work", [prometheus.text, prometheus.register])
def test_prometheus_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NsaSelError, match=r"prometheus_client, which is not installed.*pip install 'nsa-sel\[prometheus\]'"):
        work()


def test_every_kind_of_counter_has_a_metric() -> None:
    sources = [file.read_text() for folder in ("nsa_sel", "backends") for file in (ROOT / folder).rglob("*.py")]
    kinds = {kind for source in sources for kind in re.findall(r'(?:events\.count\(|\byield (?:from \(\()?)"([a-z]+)"', source)}
    assert kinds == set(prometheus.METRICS)
