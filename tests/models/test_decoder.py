"""The forward pass against transformers, whole and in every way in which it can be taken apart."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hearth.core.sizes import StepSize, counter_buffer
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.upload import Uploads
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan
from hearth.models.arch import Arch, Norm, Residual
from hearth.models.buffers import zeros
from hearth.models.decoder import Decoder
from hearth.models.dtypes import DTYPES
from hearth.models.families import read_arch
from hearth.models.layout import layout_of
from hearth.models.rope import cos_sin_table
from hearth.models.step_inputs import StepInputs
from hearth.models.weights import NormWeights, bind, contiguous_places
from hearth.models.workspace import Workspace
from tests.engine.harness import prompts_for, reference_logits
from tests.models.adapters import random_adapter
from tests.models.zoo import VARIANTS, build, pack_directory

BLOCK_TOKENS = 4
LENGTHS = [13, 1, 6]
NUM_ROWS = sum(LENGTHS)
#: One or more of each kind of residual, and windows that differ by layer.
APART = [
    "llama-gqa",
    "qwen2-window",
    "qwen3",
    "opt-pre",
    "opt-350m",
    "neox-parallel",
    "falcon-7b",
    "falcon-40b",
    "gemma2",
    "gemma3",
    "smollm3",
    "olmo3",
    "glm4",
]


@dataclass(frozen=True, slots=True)
class Stage:
    """Some layers of a model with memory of their own."""

    decoder: Decoder
    kv: torch.Tensor

    def run(self, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return self.decoder.run(hidden, step, self.kv)

    def logits(self, hidden: torch.Tensor, step: StepInputs) -> torch.Tensor:
        self.decoder.body(hidden, step, self.kv)
        return self.decoder.tail(step)


def stage(name: str, layers: range | None = None, dtype: str = "float32") -> Stage:
    """With places for these layers only, so that it cannot read another's; KV starts as NaN."""
    directory = build(name).directory
    arch = read_arch(directory)
    layout = layout_of(arch, dtype)
    base = torch.empty(layout.num_bytes, dtype=torch.uint8)
    pack_directory(directory, arch, layout, base)
    chosen = range(arch.num_layers) if layers is None else layers
    others = tuple(f"layers.{i}." for i in range(arch.num_layers) if i not in chosen)
    places = {n: place for n, place in contiguous_places(layout, base).items() if not n.startswith(others)}
    weights = bind(arch, layout, places, layers)
    size = StepSize(max_tokens=NUM_ROWS, max_samples=NUM_ROWS, num_programs=1)
    run = torch.full((Workspace.num_bytes(arch, DTYPES[dtype], size),), 0xFF, dtype=torch.uint8)
    counters = zeros(counter_buffer(arch.dimensions, NUM_ROWS), run.device)
    workspace = Workspace.bind(arch, DTYPES[dtype], size, run, counters)
    tables = [cos_sin_table(rope, arch.max_positions, run.device) for rope in arch.ropes]
    cos_sin = torch.stack(tables) if tables else None
    kv = torch.full((16, len(chosen), 2, BLOCK_TOKENS, arch.num_kv_heads, arch.head_dim), float("nan"))
    return Stage(Decoder(arch, weights, workspace, cos_sin, layers), kv)


def prompts(name: str) -> list[list[int]]:
    return prompts_for(build(name).model.config.vocab_size, LENGTHS)


def prefill(name: str) -> StepInputs:
    """Three prompts at once, in blocks that are not in order; every row is sampled."""
    asked = prompts(name)
    begins = [0]
    for prompt in asked:
        begins.append(begins[-1] + len(prompt))
    rows = PagedRows(
        positions=torch.cat([torch.arange(len(prompt), dtype=torch.int32) for prompt in asked]),
        slots=torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(LENGTHS)),
        block_table=torch.tensor([[7, 2, 9, 4], [1, 0, 0, 0], [5, 3, 0, 0]], dtype=torch.int32),
    )
    return StepInputs(
        tokens=torch.tensor([token for prompt in asked for token in prompt]),
        rows=rows,
        decode_rows=rows.first(0),
        spans=tuple(PrefillSpan(begin, length, 0) for begin, length in zip(begins, LENGTHS, strict=False)),
        num_decode=None,
        tiles=None,
        logit_rows=None,
    )


def whole_logits(name: str, step: StepInputs) -> torch.Tensor:
    whole = stage(name)
    return whole.logits(whole.decoder.embed(step), step).clone()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_every_row_are_those_of_transformers(name: str) -> None:
    expected = torch.cat([reference_logits(name, tuple(prompt)) for prompt in prompts(name)])

    logits = whole_logits(name, prefill(name))

    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embeddings_of_gemma_are_scaled_by_a_number_of_their_own_dtype(dtype: str) -> None:
    step, theirs = prefill("gemma"), deepcopy(build("gemma").model.get_input_embeddings()).to(DTYPES[dtype])

    embedded = stage("gemma", dtype=dtype).decoder.embed(step)

    assert torch.equal(embedded, theirs(step.tokens))


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("name", APART)
def test_two_stages_give_the_logits_of_the_whole_bit_by_bit(name: str, cut: int) -> None:
    step, num_layers = prefill(name), len(stage(name).decoder.layers)
    expected = whole_logits(name, step)
    head, tail = stage(name, range(cut)), stage(name, range(cut, num_layers))

    sent = head.run(head.decoder.embed(step), step).clone()
    logits = tail.logits(sent, step)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "falcon-40b"])
def test_two_stages_with_adapters_give_the_logits_of_transformers(name: str) -> None:
    """The first prompt has one adapter, the last another, the second none; only last tokens are wanted."""
    step, num_layers = prefill(name), len(stage(name).decoder.layers)
    chosen = {0: random_adapter(name, "all"), 2: random_adapter(name, "mlp")}
    table = AdapterTable(stage(name).decoder.arch.dimensions, torch.float32, Uploads(torch.device("cpu")))
    groups, logit_groups, ends = [], [], [span.rows.stop - 1 for span in step.spans]
    for index, one in chosen.items():
        table.bind(one.adapter, one.layout(), one.pieces())
        factors, rows = table[one.adapter].factors, step.spans[index].rows
        groups.append(AdapterGroup(factors, 0, np.arange(rows.start, rows.stop)))
        logit_groups.append(AdapterGroup(factors, 0, np.array([index])))
    step = replace(
        step,
        logit_rows=torch.tensor(ends),
        adapters=AdapterRows.of(groups, 64, "cpu"),
        logit_adapters=AdapterRows.of(logit_groups, 16, "cpu"),
    )
    head, tail = stage(name, range(2)), stage(name, range(2, num_layers))

    logits = tail.logits(head.run(head.decoder.embed(step), step).clone(), step)

    first, second, last = prompts(name)
    expected = torch.stack(
        [
            chosen[0].logits(first)[-1],
            reference_logits(name, tuple(second))[-1],
            chosen[2].logits(last)[-1],
        ]
    )
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_stages_cover_every_kind_of_residual() -> None:
    assert {read_arch(build(name).directory).residual for name in APART} == set(Residual)


@pytest.mark.parametrize("name", APART)
def test_a_stage_writes_the_kv_that_the_whole_writes_in_its_layers(name: str) -> None:
    step, whole, tail = prefill(name), stage(name), stage(name, range(1, 3))
    head = stage(name, range(1))
    whole.run(whole.decoder.embed(step), step)

    tail.run(head.run(head.decoder.embed(step), step).clone(), step)

    together = torch.cat([head.kv, tail.kv], dim=1)
    assert torch.equal(together.view(torch.int32), whole.kv.view(torch.int32))


@pytest.mark.parametrize("name", APART)
def test_the_parts_of_a_layer_put_together_by_hand_are_the_layer(name: str) -> None:
    step, whole, parts = prefill(name), stage(name), stage(name)
    arch, decoder = parts.decoder.arch, parts.decoder
    expected = whole.run(whole.decoder.embed(step), step)

    hidden = decoder.embed(step)
    for layer, weights in enumerate(decoder.weights.layers):
        has_norm = arch.residual not in (Residual.POST, Residual.OUTPUT)
        normed = plain_norm(arch, weights.attn_norm, hidden) if has_norm else hidden
        qkv = decoder.project(layer, normed)
        attended = decoder.attend(layer, weights, qkv, step, parts.kv[:, layer])
        for delta in decoder.absorb(layer, hidden, normed, attended):
            hidden = hidden + delta

    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "num_left"), [("llama-gqa", 0), ("opt-pre", 1), ("falcon-7b", 0), ("neox-parallel", 2)]
)
def test_products_without_a_bias_add_themselves_to_the_residual(name: str, num_left: int) -> None:
    """Fewer rows than are multiplied with factors swapped. Others are left to the norm behind them."""
    decoder = stage(name).decoder
    sizes = decoder.arch.dimensions
    residual, normed = torch.randn(2, 4, sizes.hidden_size)
    before = residual.clone()

    deltas = decoder.absorb(0, residual, normed, torch.randn(4, sizes.q_size))

    assert len(deltas) == num_left
    assert torch.equal(residual, before) == (num_left == 2)


def plain_norm(arch: Arch, weights: NormWeights | None, hidden: torch.Tensor) -> torch.Tensor:
    assert weights is not None
    size = hidden.shape[-1:]
    if arch.norm is Norm.RMS:
        return F.rms_norm(hidden, size, weights.weight, arch.norm_eps)
    return F.layer_norm(hidden, size, weights.weight, weights.bias, arch.norm_eps)


@pytest.mark.parametrize("name", APART)
def test_rows_that_nobody_samples_change_nothing_for_the_others(name: str) -> None:
    step = prefill(name)
    rows = torch.tensor([12, 13, 19, 4])
    expected = whole_logits(name, step)[rows]

    logits = whole_logits(name, replace(step, logit_rows=rows))

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", APART)
def test_a_later_chunk_and_a_decode_row_give_the_logits_of_one_prefill(name: str) -> None:
    """The first prompt: 7 tokens, then 5, then the last as a decode row."""
    (prompt, *_), whole = prompts(name), stage(name)
    expected = reference_logits(name, tuple(prompt))
    logits = []
    for start, end in ((0, 7), (7, 12), (12, 13)):
        is_decode = end - start == 1
        positions = torch.arange(start, end, dtype=torch.int32)
        rows = PagedRows(
            positions, torch.zeros_like(positions), torch.tensor([[7, 2, 9, 4]], dtype=torch.int32)
        )
        step = StepInputs(
            tokens=torch.tensor(prompt[start:end]),
            rows=rows,
            decode_rows=rows.first(int(is_decode)),
            spans=() if is_decode else (PrefillSpan(0, end - start, start),),
            num_decode=None,
            tiles=None,
            logit_rows=None,
        )
        logits.append(whole.logits(whole.decoder.embed(step), step).clone())

    assert (torch.cat(logits) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_weights_of_other_layers_are_refused() -> None:
    head, tail = stage("llama-gqa", range(1)), stage("llama-gqa", range(1, 3))

    with pytest.raises(AssertionError, match=r"len\(weights.layers\)=2"):
        head.decoder.rebind(tail.decoder.weights)
