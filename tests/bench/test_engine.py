"""The benchmark of the engine runs on a CPU with tiny models, so that it works when a GPU is at hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bench.engine import bounds, host_steps, host_trace, process, prompt_steps, start
from bench.engine.__main__ import Job, jobs
from bench.engine.arrivals import Stream, poisson, serve
from bench.engine.finding import Arm, Finding, Found, document, found_by
from bench.engine.padding import count_steps
from bench.engine.process import PARTS, findings, relayed
from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU, LLAMA_2_7B, LLAMA_3_8B, TINY, even
from bench.engine.step_budget import Span, advances_us, kinds
from bench.report import Row, peers
from bench.sharegpt import Lengths, conversations
from hearth.core.sizes import StepLimits
from hearth.core.types import RequestId, SamplingParams

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


def test_a_pass_tells_of_its_steps_and_finds_no_prefix() -> None:
    with opened(TINY.shapes["tiny"], TINY, CPU) as rig:
        rig.run(even(4, 8, 4))  # a CPU begins with few tokens a step, until it knows how long they take
        passes = [rig.run(even(4, 8, 4)).steps for _ in range(2)]

    # Four prompts in one step, then three times a token of each: the second pass computes all of it again.
    assert [steps["steps"] for steps in passes] == [4, 4]
    assert [steps["tokens_per_step"] for steps in passes] == [(4 * 8 + 3 * 4) / 4] * 2
    assert [steps["share_with_prompts"] for steps in passes] == [0.25] * 2


def test_requests_get_their_tokens_while_they_arrive_and_end_with_the_run() -> None:
    with opened(TINY.shapes["tiny"], TINY, CPU) as rig:
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        streams = [
            Stream(due_s, rig.engine.request(RequestId(str(due_s)), rig.prompts.take(1, 8)[0], params))
            for due_s in (0.1, 0.0)
        ]
        serve(rig.engine, streams, end_s=0.2, patience_s=60.0)

        assert not rig.engine.has_work
        assert rig.engine.usage.kv_used_blocks == 0
    assert all(stream.first_token_s > 0.0 for stream in streams)
    assert all(before < after for stream in streams for before, after in pairwise(stream.tokens_s))


def test_gaps_count_where_they_begin_within_the_window() -> None:
    stream = Stream(0.0, None, tokens_s=[1.0, 2.0, 4.0, 7.0])  # type: ignore[arg-type] # not looked at

    assert stream.gaps_s(2.0, 4.0) == [2.0]
    assert stream.gaps_s(0.0, 9.0) == [1.0, 2.0, 3.0]


def test_arrivals_come_at_the_rate_that_is_asked_for_and_the_same_in_every_run() -> None:
    times = list(poisson(20.0, 1.0, 501.0))

    assert times == list(poisson(20.0, 1.0, 501.0))
    assert 9_500 < len(times) < 10_500
    assert all(1.0 < before < after < 501.0 for before, after in pairwise(times))


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


def test_shapes_with_traffic_have_a_process_each_and_others_share_one() -> None:
    assert list(jobs(GPU, ["traffic", "arrivals", "shapes"], [])) == [
        Job(("7B",), ("traffic", "arrivals")),
        Job(("8B",), ("traffic", "arrivals")),
        Job(("0.5B", "1B", "70B", "256k", "falcon"), ("shapes",)),
    ]
    assert list(jobs(GPU, ["engine", "traffic", "shapes"], ["8B"])) == [Job(("8B",), ("traffic",))]


def test_traffic_comes_first_in_its_process_for_nothing_may_warm_up_before() -> None:
    assert next(jobs(GPU, list(PARTS), [])) == Job(("7B",), ("traffic", "arrivals", "engine"))


def fails() -> Found:
    raise ValueError("too hot")


def test_an_arm_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(rig: Rig) -> Mapping[str, Arm]:
        return {"bad": fails, "good": lambda: Found([Row("a", "s", 1.0)], {})}

    monkeypatch.setattr(process, "PARTS", {"traffic": arms})

    bad, good = findings(TINY, CPU, ["tiny"], ["traffic"])

    assert (bad.name, bad.error) == ("tiny bad", "ValueError: too hot")
    assert (good.name, good.error, len(good.rows)) == ("tiny good", None, 1)


def test_a_shape_that_cannot_be_opened_costs_no_other() -> None:
    found = list(findings(TINY, CPU, ["nobody's", "wide"], ["shapes"], ["one_request"]))

    assert [(one.name, one.error is None) for one in found] == [
        ("nobody's opening", False),
        ("wide one_request", True),
    ]


def test_a_process_that_dies_keeps_its_answers_and_is_told_of() -> None:
    answer = found_by("traffic", "7B even", lambda: Found([Row("a", "s", 1.0)], {"n": 1}))
    code = f"print('noise'); print({answer.line!r}); raise SystemExit(3)"

    kept, told = relayed([sys.executable, "-c", code], "traffic", "7B")

    assert kept == Finding.of_line(answer.line)
    assert (told.name, told.error) == ("7B process", "RuntimeError: it ended with status 3")


def test_a_result_keeps_what_was_not_asked_again(tmp_path: Path) -> None:
    def found(value: float) -> Callable[[], Found]:
        return lambda: Found([Row("a", "s", value)], {})

    earlier = tmp_path / "traffic.json"
    names = {"7B even": 1.0, "8B even": 2.0}
    old = document([found_by("traffic", name, found(value)) for name, value in names.items()], earlier)
    earlier.write_text(json.dumps(old))

    new = document([found_by("traffic", "8B even", found(3.0)), found_by("traffic", "x", fails)], earlier)

    assert [row["value"] for row in new["rows"]] == [1.0, 3.0]  # type: ignore[attr-defined] # JSON
    results = new["results"]
    assert isinstance(results, dict)
    assert all("environment" in result for result in results.values())


def test_the_hosts_part_of_steps_is_timed_without_a_gpu() -> None:
    engine = host_steps.opened(host_steps.TINY_SHAPE, CPU, num_rows=2)
    host_steps.begun(engine, 2, host_steps.GREEDY)

    found, parts = host_steps.median_us(engine), host_steps.parts_us(engine)

    host_steps.end(engine, 2)
    assert 0 < found["host"] <= found["step"]
    assert 0 < parts["plan"] < parts["all, timed"]
    engine.close()


def test_steps_with_prompts_are_timed_without_a_gpu() -> None:
    wave = prompt_steps.Wave.parse("3x40+2")

    waves = prompt_steps.traced(wave, max_seqs=32, num_blocks=400)

    prompts = waves.with_prompts
    assert len(prompts) == len(waves.added_s) == prompt_steps.NUM_WAVES
    assert {len(step.plan.prompts) for step in prompts[1:] if step.plan is not None} == {wave.num_prompts}
    assert all(0 < step.parts["plan"].cpu_s < step.cpu_s for step in prompts)


def test_prompts_that_begin_alike_find_what_the_first_have_computed() -> None:
    wave = prompt_steps.Wave.parse("3x40~32")

    waves = prompt_steps.traced(wave, max_seqs=32, num_blocks=400)

    late = [step.plan for step in waves.with_prompts[3:] if step.plan is not None]
    assert {row.start for plan in late for row in plan.prompts} == {32}


def test_the_longest_steps_of_traffic_are_told_by_part() -> None:
    engine = host_steps.opened(host_steps.TINY_SHAPE, CPU, num_rows=2)
    trace = host_trace.HostTrace(engine)
    host_steps.add_all(engine, 2, host_steps.GREEDY)

    for _ in range(3):
        engine.step()

    host_steps.end(engine, 2)
    trace.close()
    first, *_ = trace.steps
    assert first.plan is not None
    assert first.plan.num_prompt_tokens > 0
    assert 0 < first.parts["plan"].wall_s < first.host_s <= first.whole.wall_s
    assert {"launch", "wait", "take_tokens"} <= trace.steps[-1].parts.keys()
    assert "plan" in first.line()
    engine.close()


_IN_LINE = """add_norm nvjet_splitK splitKreduce rotate_and_store decode_attention nvjet splitKreduce add_norm
nvjet
activate nvjet add_norm nvjet best_token"""
_SIDE_BY_SIDE = """add_norm nvjet rotate_and_store decode_attention nvjet nvjet activate nvjet add_norm
nvjet best_token"""


@pytest.mark.parametrize(
    ("names", "products"),
    [(_IN_LINE, "qkv qkv o o up down head"), (_SIDE_BY_SIDE, "qkv o up down head")],
)
def test_products_of_a_traced_step_are_told_by_their_neighbours(names: str, products: str) -> None:
    spans = [Span(float(at), at + 1.0, name) for at, name in enumerate(names.split())]

    told = [kind for kind, _ in kinds(spans) if kind.endswith(" product")]

    assert told == [f"{name} product" for name in products.split()]


def test_a_kernel_that_starts_early_advances_a_step_from_the_end_of_the_one_in_front() -> None:
    spans = [
        Span(10.0, 14.0, "first"),
        Span(11.0, 17.0, "early"),
        Span(12.0, 13.0, "within"),
        Span(18.0, 20.0, "late"),
    ]

    assert advances_us(spans) == [4.0, 3.0, 0.0, 3.0]


def test_all_steps_of_requests_are_counted_by_their_padded_rows() -> None:
    limits = StepLimits(max_batch_tokens=64, max_seqs=4, block_tokens=4)

    counts = count_steps(limits, [Lengths(6, 3), Lengths(6, 1)], num_blocks=32)

    rows = {
        (shape.has_prompts, shape.num_rows, num_tokens): count
        for (shape, num_tokens), count in counts.items()
    }
    assert rows == {(True, 64, 12): 1, (False, 1, 1): 2}


def test_a_start_that_failed_has_no_line_and_costs_no_other() -> None:
    results: dict[str, object] = {
        "compile_2": {"error": "RuntimeError()"},
        "filled": {"first_token_s": 2.5, "kernels_compiled_while_serving": 0},
        "service_empty": {"ready_s": 3.5, "first_text_s": 9.0},
    }

    found = {(row.measure.partition(",")[0], row.unit): row.value for row in start.rows(results)}

    assert found == {
        ("LLM", "s"): 2.5,
        ("`hearth serve` to ready", "s"): 3.5,
        ("`hearth serve` to the first text of a 1.1B", "s"): 9.0,
        ("kernels compiled while random requests run", "kernels"): 0,
    }
