"""Series by model: how many there are, whose they are, and that Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from hearth.control.observe.model_metrics import MAX_MODEL_LABELS, OTHER_MODELS, ModelMetrics, ModelSeries


def labels_of(metrics: ModelMetrics) -> set[str]:
    families = text_string_to_metric_families("".join(metrics.families()))
    return {sample.labels["model"] for family in families for sample in family.samples}


def ask(series: ModelSeries) -> None:
    series.requests["stop"] += 1


def test_models_beyond_a_number_are_counted_as_one() -> None:
    metrics = ModelMetrics()
    for number in range(MAX_MODEL_LABELS + 7):
        ask(metrics.take(f"model-{number}"))

    families = {one.name: one for one in text_string_to_metric_families("".join(metrics.families()))}
    counted = {sample.labels["model"]: sample.value for sample in families["hearth_requests"].samples}
    assert len(counted) == MAX_MODEL_LABELS + 1
    assert (counted["model-0"], counted[OTHER_MODELS]) == (1, 7)


def test_a_removed_model_makes_room_for_one_that_had_none() -> None:
    metrics = ModelMetrics()
    for number in range(MAX_MODEL_LABELS + 1):
        ask(metrics.take(f"model-{number}"))
    late = f"model-{MAX_MODEL_LABELS}"
    metrics.remove("model-0")
    ask(metrics.take(late))

    assert "model-0" not in labels_of(metrics)
    assert labels_of(metrics) >= {late, OTHER_MODELS}
    assert (metrics.find("model-0"), metrics.find(late)) == (None, metrics.take(late))


def test_a_model_that_is_counted_with_others_is_found_there_until_it_is_removed() -> None:
    metrics = ModelMetrics()
    for number in range(MAX_MODEL_LABELS):
        metrics.take(f"model-{number}")
    assert metrics.take("late") is metrics.find("late")
    metrics.remove("late")
    assert metrics.find("late") is None


def test_a_name_cannot_end_its_label() -> None:
    metrics, name = ModelMetrics(), 'a"} 1\nb\\'
    ask(metrics.take(name))
    assert labels_of(metrics) == {name}


def test_money_is_counted_only_at_a_price() -> None:
    priced, free = ModelMetrics(3.6), ModelMetrics()
    for metrics in (priced, free):
        metrics.take("a").device_s += 500.0
    assert 'hearth_cost_total{model="a"} 0.5\n' in "".join(priced.families())
    assert "hearth_cost" not in "".join(free.families())


def test_a_histogram_has_its_count_beside_its_buckets() -> None:
    metrics = ModelMetrics()
    for seconds in (0.004, 0.3, 500.0):
        metrics.take("a").first_token.observe(seconds)
    (family, *_) = text_string_to_metric_families("".join(metrics.families()))
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert values["hearth_ttft_seconds_bucket", "0.5"] == 2
    assert values["hearth_ttft_seconds_bucket", "+Inf"] == values["hearth_ttft_seconds_count", None] == 3
