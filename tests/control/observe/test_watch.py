"""Metrics, document and dashboard agree: all is told, and nothing that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
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
ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yaml"


def alerts() -> dict[str, dict[str, str]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


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


def check_names(query: str, families: dict[str, Family]) -> None:
    """Fail if a query names no metric, or a metric or label that the service does not have."""
    labels = {name: {*family.labels, "job", "instance"} for name, family in families.items()}
    for name, family in families.items():
        if family.kind == "histogram":
            labels |= {f"{name}_bucket": {*labels[name], "le"}, f"{name}_sum": labels[name]}
    named = metrics_in(query)
    assert named, f"no metric in: {query}"
    for name, used in named.items():
        assert used <= labels.get(name, set()), query


def test_the_dashboard_asks_for_metrics_and_labels_that_are_there(families: dict[str, Family]) -> None:
    for query in (query for asked in queries().values() for query in asked):
        check_names(query, families)


def test_alerts_ask_for_metrics_and_labels_that_are_there_and_are_in_the_document(
    families: dict[str, Family],
) -> None:
    rules = alerts()
    for name, rule in rules.items():
        if name != "HearthDown":  # `up` is Prometheus' own
            check_names(rule["expr"], families)
    told = [line.split("`")[1] for line in WATCH.read_text().splitlines() if line.startswith("| `Hearth")]
    assert told == list(rules)


#: By alert: series that raise it, and the same without its cause, as promtool writes values over minutes.
CAUSES = {
    "HearthDown": ['up{job="hearth"} 0x60', 'up{job="hearth"} 1x60'],
    "HearthNoWorkers": ["hearth_workers_ready 0x60", "hearth_workers_ready 1x60"],
    "HearthWorkersLost": ["hearth_workers_lost_total 0+1x60", "hearth_workers_lost_total 1x60"],
    "HearthNodeDown": ['hearth_node_up{node="b"} 0x60', 'hearth_node_up{node="b"} 1x60'],
    "HearthErrors": [
        'hearth_http_responses_total{status="503"} 0+1x60',
        'hearth_http_responses_total{status="404"} 0+1x60',
    ],
    "HearthModelFails": [
        'hearth_requests_total{model="m",outcome="workers_lost"} 0+1x60',
        'hearth_requests_total{model="m",outcome="cancelled"} 0+1x60',
    ],
    "HearthQueueLong": [
        'hearth_queue_seconds_bucket{le="30"} 0+10x60',
        'hearth_queue_seconds_bucket{le="5"} 0+10x60',
    ],
    "HearthTokensLate": ["hearth_tokens_late_total 0+3x60", "hearth_tokens_late_total 0+1x60"],
    "HearthOpenFiles": ['process_open_fds{job="hearth"} 95x60', 'process_open_fds{job="hearth"} 50x60'],
}
BESIDE = {
    "HearthErrors": ['hearth_http_responses_total{status="200"} 0+9x60'],
    "HearthModelFails": ['hearth_requests_total{model="m",outcome="stop"} 0+3x60'],
    "HearthQueueLong": [
        'hearth_queue_seconds_bucket{le="10"} 0+5x60',
        'hearth_queue_seconds_bucket{le="+Inf"} 0+10x60',
    ],
    "HearthTokensLate": ["hearth_tokens_on_time_total 0+9x60"],
    "HearthOpenFiles": ['process_max_fds{job="hearth"} 100x60'],
}


def test_each_alert_is_raised_by_its_cause_alone(tmp_path: Path) -> None:
    """By promtool, which evaluates the rules as Prometheus would."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package `prometheus` has it)")
    assert CAUSES.keys() == alerts().keys()
    cases = []
    for name, (ill, well) in CAUSES.items():
        for cause, is_raised in ((ill, True), (well, False)):
            series = [line.rpartition(" ") for line in [cause, *BESIDE.get(name, [])]]
            cases.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": one[0], "values": one[2]} for one in series],
                    "promql_expr_test": [
                        {
                            "expr": f"count(ALERTS{{alertname='{name}',alertstate='firing'}}) or vector(0)",
                            "eval_time": "40m",
                            "exp_samples": [{"labels": "{}", "value": int(is_raised)}],
                        }
                    ],
                }
            )
    written = tmp_path / "tests.json"
    written.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": cases}))
    said = subprocess.run(
        ["promtool", "test", "rules", written], capture_output=True, text=True, timeout=240, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_dashboard_shows_all_that_is_counted_by_model(families: dict[str, Family]) -> None:
    asked = {name for each in queries().values() for query in each for name in metrics_in(query)}
    by_model = {name for name, family in families.items() if "model" in family.labels}
    assert {name for name in by_model if name not in asked and f"{name}_bucket" not in asked} == set()
