"""The benchmark of reuse runs on a CPU with tiny models, so that it works when a GPU is at hand."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report import Row, peers
from bench.reuse.finetunes import changed_chunks
from bench.reuse.models import LARGE, MIDDLE, MIX, SMALL, drawn
from bench.reuse.parts import PARTS, document, host_pages, measure
from bench.reuse.setting import ARMS, PRESSURES, TINY, Aim, Part, Scale, Setting
from bench.reuse.workload import DAY_S, LEVELS, Level, run_lengths, workload
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


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(LEVELS)), st.integers(1, 60), st.integers(0, 1000))
def test_a_workload_has_the_wanted_runs_in_the_order_of_time(name: str, num_runs: int, seed: int) -> None:
    asked = workload(LEVELS[name], run_lengths(), num_runs, seed)

    assert sorted({one.run for one in asked}) == list(range(num_runs))
    assert all(early.at_s < late.at_s for early, late in itertools.pairwise(asked))
    assert all(
        early.model == late.model for early, late in itertools.pairwise(asked) if early.run == late.run
    )
    assert asked == workload(LEVELS[name], run_lengths(), num_runs, seed)


def test_the_first_level_never_asks_for_a_model_twice_in_a_row() -> None:
    asked = workload(LEVELS["L1"], run_lengths(), 500, seed=3)

    assert len(asked) == 500
    assert all(early.model != late.model for early, late in itertools.pairwise(asked))


def test_levels_with_more_locality_ask_for_another_model_less_often() -> None:
    def switches(name: str) -> float:
        asked = workload(LEVELS[name], run_lengths(), 500, seed=3)
        return sum(a.model != b.model for a, b in itertools.pairwise(asked)) / len(asked)

    shares = [switches(name) for name in LEVELS]

    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("cv", [0.25, 0.5, 1.0, 2.0])
def test_runs_begin_with_the_wanted_mean_and_variation(cv: float) -> None:
    asked = workload(Level(cv, 1.0), [[1] * 10], 4000, seed=5)
    gaps = [late.at_s - early.at_s for early, late in itertools.pairwise(asked)]

    assert fmean(gaps) == pytest.approx(DAY_S / 10, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


def test_half_of_a_run_is_rounded_up() -> None:
    asked = workload(LEVELS["L2"], [[5]], 3, seed=0)

    assert len(asked) == 3 * 3


def test_the_models_of_the_benchmark_have_tangrams_sizes_and_fit_the_smallest_budget() -> None:
    kinds = setting(Scale()).kinds()
    sizes = [layout_of(kind.arch(Scale().depth), "bfloat16").num_bytes for kind in kinds]

    assert [sum(kind in choice for kind in kinds) for choice in (SMALL, MIDDLE, LARGE)] == [2, 5, 1]
    assert len(set(kinds)) == 8
    assert max(sizes) < sum(sizes) / max(PRESSURES)
    assert 40e9 < sum(sizes) < 60e9


def test_a_draw_that_never_fits_says_so() -> None:
    with pytest.raises(ValueError, match="no draw of models fits"):
        drawn(MIX, 1.0, lambda sizes: False, seed=0)


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


def test_mapped_pages_move_nothing_and_packing_moves_no_more_than_merging_all(result: dict[str, Any]) -> None:
    moved = result["results"]["placing"]["moved_bytes"]

    assert moved["mapped"] == 0
    assert moved["arena"] <= moved["merge_all"]


def test_the_fewer_fillers_the_less_of_a_model_is_missing(result: dict[str, Any]) -> None:
    retained = result["results"]["switch"]["retained"]
    missing = [one["missing_bytes"] for one in retained.values()]

    assert list(retained) == ["100%", "75%", "50%", "25%", "0%"]
    assert missing[0] == 0
    assert missing == sorted(missing)
    assert missing[-1] > 0


def test_the_second_fine_tune_loads_only_its_own_chunks(result: dict[str, Any]) -> None:
    found = result["results"]["finetunes"]
    share = found["num_changed_chunks"] / found["num_chunks"]

    assert found["second"]["load_bytes"] == pytest.approx(share * found["full"]["load_bytes"], rel=0.1)
    assert found["second"]["shared_bytes"] + found["second"]["load_bytes"] == found["full"]["load_bytes"]


def test_parts_that_are_not_run_stay_as_they_were(result: dict[str, Any], tmp_path: Path) -> None:
    earlier = tmp_path / "reuse.json"
    earlier.write_text(json.dumps(result))
    row, aim = Row("a measure", "ratio", 0.5), Aim.most("an aim", 0.5, 1.0)

    again: Any = document({"placing": Part([row], [aim], {"found": 1})}, earlier)

    assert list(again["results"]) == list(PARTS)
    assert again["results"]["placing"]["found"] == 1
    assert again["results"]["switch"] == result["results"]["switch"]
    for key in ("rows", "aims"):
        others = [one for one in result[key] if one["part"] != "placing"]
        assert [one for one in again[key] if one["part"] != "placing"] == json.loads(json.dumps(others))
        assert len(again[key]) == len(others) + 1


def test_the_published_figures_are_there_for_the_table() -> None:
    published: Any = peers()["reuse"]

    assert 0 < published["peers"]["Tangram"]["best"] < published["peers"]["Tangram"]["worst"] < 1
