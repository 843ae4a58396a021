"""The benchmark that writes profiles runs on a CPU with tiny models, so that it works with a GPU at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace as replace_struct

from bench.profile.__main__ import Draft, measure, origin, read_draft
from bench.profile.scale import TINY_CPU
from hearth.core.types import Rung
from hearth.sim.profile import Profile
from hearth.snapshot.cost_profile import VERSION

CPU = torch.device("cpu")


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
