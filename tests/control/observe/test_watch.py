"""Metrics, document and dashboard agree: all is told, and nothing that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from hearth.control.datadir import DataDir
from hearth.control.observe.access_log import fields_of
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics
from hearth.core.messages import ModelUse, Pong
from hearth.core.types import Hold, ModelId
from tests.control.gateway_rig import GatewayRig, with_rig
from tests.control.shown_metrics import check_with_promtool, shown
from tests.dashboard import metrics_in, queries

WATCH = Path(__file__).parents[3] / "docs" / "watch.md"


@dataclass(frozen=True, slots=True)
class Family:
    kind: str
    text: str
    labels: tuple[str, ...]


def touch_all(metrics: Metrics) -> None:
    """Have every metric show all of its labels."""
    for counter in vars(metrics).values():
        if isinstance(counter, Counter | Gauge) and counter._labelnames:
            counter.labels(*counter._labelnames).inc()
    series = metrics.models.take("tiny")
    for counts in (series.requests, series.turns, series.loads):
        counts["x"] += 1


@pytest.fixture
def text(data_dir: DataDir) -> str:
    """All metrics of a service that has done everything once."""
    found = []

    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        use = ModelUse(ModelId("tiny"), Hold.WARM, True, 10, 10, 0, 0)
        rig.receive(link, Pong(1, 100, 90, 0, 0, 0, {"address": 1}, (use,)))
        touch_all(rig.metrics)
        found.append(shown(rig.metrics))

    with_rig(data_dir, scene)
    return found[0]


@pytest.fixture
def families(text: str) -> dict[str, Family]:
    """By the names that queries use."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): Family(
            family.type,
            family.documentation,
            tuple(dict.fromkeys(key for one in family.samples for key in one.labels if key != "le")),
        )
        for family in text_string_to_metric_families(text)
    }


def test_metrics_are_as_prometheus_wants_them(text: str, families: dict[str, Family]) -> None:
    assert "_created" not in text
    assert all(name.startswith(("hearth_", "process_")) for name in families)
    check_with_promtool(text)


def test_the_document_lists_every_metric_as_it_is(families: dict[str, Family]) -> None:
    rows = [
        f"| `{name}` | {family.kind} | {', '.join(family.labels)} | {family.text} |"
        for name, family in sorted(families.items())
    ]
    told = [line for line in WATCH.read_text().splitlines() if line.startswith(("| `hearth_", "| `process_"))]
    assert told == rows, "the table should be:\n" + "\n".join(rows)


def test_the_document_lists_every_field_of_the_access_log() -> None:
    section = WATCH.read_text().partition("\n## Access log\n")[2].partition("\n## ")[0]
    told = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert told == list(fields_of(ExchangeRecord()))


def test_the_dashboard_asks_for_metrics_and_labels_that_are_there(families: dict[str, Family]) -> None:
    labels = {name: set(family.labels) for name, family in families.items()}
    for name, family in families.items():
        if family.kind == "histogram":
            labels |= {f"{name}_bucket": {*family.labels, "le"}, f"{name}_sum": set(family.labels)}
    for query in (query for asked in queries().values() for query in asked):
        named = metrics_in(query)
        assert named, f"no metric in: {query}"
        for name, used in named.items():
            assert used <= labels.get(name, set()), query


def test_the_dashboard_shows_all_that_is_counted_by_model(families: dict[str, Family]) -> None:
    asked = {name for each in queries().values() for query in each for name in metrics_in(query)}
    by_model = {name for name, family in families.items() if "model" in family.labels}
    assert {name for name in by_model if name not in asked and f"{name}_bucket" not in asked} == set()
