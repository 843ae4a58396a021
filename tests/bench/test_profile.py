"""The benchmark that writes profiles runs on a CPU with tiny models, so that it works with a GPU at hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace as replace_struct

from bench.profile.__main__ import PARTS, Draft, measure, origin, read_draft
from bench.profile.behind import measure_behind_loads
from bench.profile.beside import host_times
from bench.profile.moves import fit_loads
from bench.profile.scale import GPU, TINY_CPU
from bench.random_model import TINY as TINY_CONFIG
from bench.shape import Shape
from bench.turns.beside import Gap, Times, ToldStep
from hearth.core.types import Rung
from hearth.sim.profile import Profile
from hearth.snapshot.cost_profile import VERSION, MeasuredProfile, MeasuredShape, MeasuredStep, MeasuredSwitch

CPU = torch.device("cpu")
GB = 10**9


def measured(path: Path, **changes: object) -> Profile:
    draft = Draft(path, {"version": VERSION, "origin": origin(["--tiny"], is_tiny=True)})
    measure(replace(TINY_CPU, **changes), CPU, draft)  # type: ignore[arg-type] # names of fields
    return Profile.load(path)


def test_a_run_writes_a_profile_with_all_kinds_of_steps(tmp_path: Path) -> None:
    profile = measured(tmp_path / "tiny.json")

    assert profile.measured.origin.is_tiny
    assert profile.bytes_per_s[Rung.HOST] > 0.0
    assert profile.assemble_s > 0.0
    for shape, scaled in zip(profile.measured.shapes, TINY_CPU.shapes, strict=True):
        assert shape.weights_bytes == scaled.weights_bytes
        kinds = {(step.num_tokens, step.num_rows) for step in shape.steps}
        assert {(rows, rows) for rows in TINY_CPU.batches} <= kinds
        assert {(tokens, 1) for tokens in TINY_CPU.prompts} <= kinds
        assert all(step.device_s is not None and step.device_s > 0.0 for step in shape.steps)
        (beside,) = TINY_CPU.busy_rows
        assert (beside + TINY_CPU.prompts[0], beside + 1) in kinds


def test_a_single_model_is_measured_and_switched_too(tmp_path: Path) -> None:
    profile = measured(tmp_path / "one.json", shapes=TINY_CPU.shapes[:1])

    assert list(profile.shapes) == ["tiny"]
    assert profile.give_way_s + profile.begin_s > 0.0


def test_small_steps_and_returns_can_be_measured_again_beside_the_rest(tmp_path: Path) -> None:
    scale, path = replace(TINY_CPU, shapes=TINY_CPU.shapes[:1]), tmp_path / "again.json"
    large, small = MeasuredStep(128, 128, 900, 5.0), MeasuredStep(1, 1, 16, 5.0)
    shape = MeasuredShape("tiny", "tiny", "float32", scale.shapes[0].weights_bytes, 64, [large, small])
    switch = MeasuredSwitch("by hand", give_way_s=0.0, begin_s=0.0)
    found = origin([], is_tiny=True)
    path.write_bytes(
        msgspec.json.encode(
            {"origin": found, "shapes": [shape], "switch": switch, "bytes_per_s": {Rung.HOST: 1e12}}
        )
    )
    draft = read_draft(path, path, found)
    for part in ("steps", "returns"):
        PARTS[part](scale, CPU, draft)

    written = json.loads(path.read_bytes())
    steps = msgspec.convert(written["shapes"][0]["steps"], type=list[MeasuredStep])
    assert large in steps
    assert small not in steps
    assert {(rows, rows) for rows in scale.batches} <= {(one.num_tokens, one.num_rows) for one in steps}
    assert written["shapes"][0]["eager_s"] == 0.0, "a CPU captures nothing"
    assert written["return_s"] > 0.0
    assert written["origin"]["later"].keys() == {"shapes", "return_s"}


def test_first_tokens_behind_loads_are_timed_of_each_shape_while_another_model_answers() -> None:
    config = {**TINY_CONFIG, "intermediate_size": 2048, "num_hidden_layers": 8}
    wide = Shape("wide", "wide", config, "float32")  # whose weights are most of what a model takes
    found = measure_behind_loads(replace(TINY_CPU, shapes=(wide,), turn_tokens=150), CPU)

    assert found.keys() == {"wide"}, "the one that it takes turns with is no shape of its own"
    assert found["wide"] > 0.0


def test_the_smallest_steps_with_prompts_tell_what_the_host_takes_for_them() -> None:
    def gaps(num_steps: int, num_prompt_tokens: int, seconds: float) -> list[Gap]:
        return [Gap(seconds, ToldStep(0.0, num_prompt_tokens, 0.9 * seconds))] * num_steps

    prompts = [*gaps(50, 127, 0.002), *gaps(40, 63, 0.0015), *gaps(5, 30, 0.0015), *gaps(3, 200, 0.004)]
    found = host_times(Times([0.001], [0.001, 0.003], [0.001], prompts=prompts))

    assert found.prompt_step_s == pytest.approx(0.0015)
    assert found.prompt_step_told_s == pytest.approx(0.00135)
    assert (found.beside_load_s, found.beside_load_told_s) == (0.002, 0.001)
    assert asdict(found).keys() <= set(MeasuredProfile.__struct_fields__)


def test_loads_take_a_time_of_their_own_besides_their_bytes_whatever_one_of_them_met() -> None:
    loads = [(num_bytes, 0.004 + num_bytes / 50e9) for num_bytes in (2 * GB, 6 * GB, 9 * GB)] * 3
    line = fit_loads([*loads, (6 * GB, 1.0)], TINY_CPU)

    assert line.first_s == pytest.approx(0.004)
    assert line.bytes_per_s == pytest.approx(50e9)


def test_of_loads_of_one_size_all_time_is_that_of_their_bytes() -> None:
    line = fit_loads([(2 * GB, 0.05), (2 * GB, 0.04), (2 * GB, 0.05)], TINY_CPU)

    assert (line.first_s, line.bytes_per_s) == (0.0, pytest.approx(40e9))


def test_what_is_measured_is_written_at_once(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "deep" / "part.json", {"version": VERSION})
    draft.add(assemble_s=0.5)
    draft.add(host_step_s=0.1)

    assert json.loads(draft.path.read_text()) == {"version": VERSION, "assemble_s": 0.5, "host_step_s": 0.1}


def test_a_part_measured_later_is_no_longer_assumed_and_says_where_it_is_from(tmp_path: Path) -> None:
    found = origin(["--only", "requests"], is_tiny=True)
    assumed = {"request_s": "nothing was asked", "bytes_per_s.object": "a link"}
    kept = tmp_path / "kept.json"
    kept.write_bytes(msgspec.json.encode({"origin": replace_struct(found, commit="old", assumed=assumed)}))
    read_draft(tmp_path / "new.json", kept, found).add(request_s=0.003, wake_s=0.002)

    written = json.loads((tmp_path / "new.json").read_bytes())["origin"]
    assert written["assumed"] == {"bytes_per_s.object": "a link"}
    assert written["commit"] == "old"
    assert written["later"].keys() == {"request_s", "wake_s"}
    assert written["later"]["wake_s"]["command"] == "python -m bench.profile --only requests"


def test_parts_of_no_profile_or_of_that_of_another_device_are_refused(tmp_path: Path) -> None:
    found, kept = origin([], is_tiny=True), tmp_path / "kept.json"
    with pytest.raises(SystemExit, match="there is none"):
        read_draft(tmp_path / "new.json", kept, found)

    kept.write_bytes(msgspec.json.encode({"origin": replace_struct(found, device="NVIDIA Other")}))
    with pytest.raises(SystemExit, match="was measured on NVIDIA Other"):
        read_draft(tmp_path / "new.json", kept, found)


def test_sizes_on_a_gpu_are_those_of_the_models_whose_shapes_they_have() -> None:
    sizes = {shape.name: (shape.weights_bytes, shape.kv_bytes_per_token) for shape in GPU.shapes}

    assert 2.4e9 < sizes["1B"][0] < 2.6e9
    assert 6.3e9 < sizes["3B"][0] < 6.6e9
    assert 13.4e9 < sizes["7B"][0] < 13.6e9
    assert [kv_bytes for _, kv_bytes in sizes.values()] == [32 << 10, 112 << 10, 512 << 10]
