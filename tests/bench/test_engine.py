"""The benchmark of the engine runs on a CPU with tiny models, so that it works when a GPU is at hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
import torch

from bench.engine import bounds, host_steps, process, prompt_steps
from bench.engine.finding import Arm, Finding, Found, found_by
from bench.engine.process import PARTS, findings, relayed
from bench.engine.rig import Rig
from bench.engine.scale import GPU, LLAMA_2_7B, LLAMA_3_8B, TINY
from bench.report import Row, peers
from bench.sharegpt import Lengths, conversations

CPU = torch.device("cpu")


@pytest.mark.parametrize("part", PARTS)
def test_every_arm_of_a_part_answers_with_rows_for_the_table(part: str) -> None:
    shape = TINY.shapes_by_part[part][0]

    found = list(findings(TINY, CPU, [shape.name], [part]))

    assert [finding.error for finding in found] == [None] * len(found)
    rows = [row for finding in found for row in finding.rows]
    assert rows
    assert all(row["value"] > 0 for row in rows)  # type: ignore[operator] # JSON
    assert len({row["measure"] for row in rows}) == len(rows)
    assert all(Finding.of_line(finding.line).name == finding.name for finding in found)


def test_the_conversations_are_those_that_peers_were_asked() -> None:
    first = conversations()[:600]

    assert first[:3] == (Lengths(25, 318), Lengths(137, 550), Lengths(55, 900))
    assert (sum(one.prompt for one in first), sum(one.new for one in first)) == (154_827, 193_425)
    assert list(GPU.traffic["sharegpt"].requests) == list(first)


def test_bounds_are_those_of_the_device() -> None:
    assert round(1 / bounds.decode_s(LLAMA_2_7B, num_rows=1, context=0)) == 318
    # The linears alone take 40.2 ms, attention the rest.
    assert 1e3 * bounds.prompts_s(LLAMA_2_7B, num_prompts=1, length=2048) == pytest.approx(41.9, abs=0.1)
    # 64 rows read the weights once and KV each.
    kv_s = 64 * 1000 * LLAMA_3_8B.kv_bytes_per_token / bounds.BYTES_PER_S
    read_s = bounds.decode_s(LLAMA_3_8B, 64, 1000) - bounds.decode_s(LLAMA_3_8B, 64, 0)
    assert read_s == pytest.approx(kv_s)


def test_every_figure_of_a_peer_belongs_to_a_row() -> None:
    figures = peers()["traffic"]["peers"]  # type: ignore[index] # JSON
    asked = {*GPU.traffic, "one_request", *(f"prompt_{length}" for length in GPU.prompts)}

    for by_shape in figures.values():
        assert set(by_shape) <= {shape.name for shape in GPU.shapes_by_part["traffic"]}
        assert all(set(keys) <= asked for keys in by_shape.values())


def fails() -> Found:
    raise ValueError("too hot")


def test_an_arm_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(rig: Rig) -> Mapping[str, Arm]:
        return {"bad": fails, "good": lambda: Found([Row("a", "s", 1.0)], {})}

    monkeypatch.setattr(process, "PARTS", {"traffic": arms})

    bad, good = findings(TINY, CPU, ["tiny"], ["traffic"])

    assert (bad.name, bad.error) == ("tiny bad", "ValueError: too hot")
    assert (good.name, good.error, len(good.rows)) == ("tiny good", None, 1)


def test_a_process_that_dies_keeps_its_answers_and_is_told_of() -> None:
    answer = found_by("traffic", "7B even", lambda: Found([Row("a", "s", 1.0)], {"n": 1}))
    code = f"print('noise'); print({answer.line!r}); raise SystemExit(3)"

    kept, told = relayed([sys.executable, "-c", code], "traffic", "7B")

    assert kept == Finding.of_line(answer.line)
    assert (told.name, told.error) == ("7B process", "RuntimeError: it ended with status 3")


def test_the_hosts_part_of_steps_is_timed_without_a_gpu() -> None:
    engine = host_steps.opened(host_steps.TINY_SHAPE, CPU, num_rows=2)
    host_steps.begun(engine, 2, host_steps.GREEDY)

    found, parts = host_steps.median_us(engine), host_steps.parts_us(engine)

    host_steps.end(engine, 2)
    assert 0 < found["host"] <= found["step"]
    assert 0 < parts["plan"] < parts["all, timed"]
    engine.close()


def test_prompts_that_begin_alike_find_what_the_first_have_computed() -> None:
    wave = prompt_steps.Wave.parse("3x40~32")

    waves = prompt_steps.traced(wave, max_seqs=32, num_blocks=400)

    late = [step.plan for step in waves.with_prompts[3:] if step.plan is not None]
    assert {row.start for plan in late for row in plan.prompts} == {32}
