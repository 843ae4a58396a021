"""The benchmark of reuse runs on a CPU with tiny models, so that it works when a GPU is at hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.report import peers
from bench.reuse.finetunes import changed_chunks
from bench.reuse.models import LARGE, MIDDLE, SMALL
from bench.reuse.parts import PARTS, document, host_pages, measure
from bench.reuse.setting import ARMS, PRESSURES, TINY, Scale, Setting
from hearth.models.layout import layout_of
from hearth.store.transfer.transfer import Loader

CPU = torch.device("cpu")
SCALE = replace(TINY, levels=("L2",), num_warm_runs=2, num_runs=3)
ROW = {"measure", "unit", "value", "bound", "aim", "peers", "is_comparable", "part"}


def setting(scale: Scale) -> Setting:
    return Setting(scale, CPU, Loader(CPU), host_pages)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return document(measure(setting(SCALE), PARTS), earlier=Path("nothing"))


def test_the_models_of_the_benchmark_have_tangrams_sizes_and_fit_the_smallest_budget() -> None:
    kinds = setting(Scale()).kinds()
    sizes = [layout_of(kind.arch(Scale().depth), "bfloat16").num_bytes for kind in kinds]

    assert [sum(kind in choice for kind in kinds) for choice in (SMALL, MIDDLE, LARGE)] == [2, 5, 1]
    assert len(set(kinds)) == 8
    assert max(sizes) < sum(sizes) / max(PRESSURES)
    assert 40e9 < sum(sizes) < 60e9


def test_no_two_chunks_are_equal_but_those_that_fine_tunes_share() -> None:
    with setting(SCALE).library({"base": SCALE.whole_arch}, SCALE.max_changed_chunks) as shelf:
        base = shelf.models[0]
        changed = changed_chunks(base.manifest)
        tuned = shelf.add_changed("tuned", base, changed)

        chunks = base.manifest.chunk_ids
        assert len(set(chunks)) == len(chunks)
        own = set(tuned.shape.chunks) - set(chunks)
        assert len(own) == len(changed) > 0


def test_every_part_gives_rows_for_the_table_and_aims(result: dict[str, Any]) -> None:
    assert list(result["results"]) == list(PARTS)
    assert all(set(row) == ROW and math.isfinite(row["value"]) for row in result["rows"])
    assert len({row["measure"] for row in result["rows"]}) == len(result["rows"])
    assert {aim["met"] for aim in result["aims"]} <= {True, False}
    assert len({aim["what"] for aim in result["aims"]}) == len(result["aims"])


def test_all_arms_run_the_same_requests_and_reuse_loads_less(result: dict[str, Any]) -> None:
    points = result["results"]["workloads"]["points"]

    assert [point["pressure"] for point in points] == list(PRESSURES)
    for point in points:
        arms = point["arms"]
        assert sorted(arms) == sorted(ARMS)
        assert len({arm["num_requests"] for arm in arms.values()}) == 1
        assert all(arm["num_verified"] > 0 for arm in arms.values())
        assert arms["mapped"]["missing_bytes"] <= arms["no_reuse"]["missing_bytes"]


def test_the_published_figures_are_there_for_the_table() -> None:
    published: Any = peers()["reuse"]

    assert 0 < published["peers"]["Tangram"]["best"] < published["peers"]["Tangram"]["worst"] < 1
