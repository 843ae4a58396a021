from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from hearth.kernels import jit, step_tokens
from hearth.kernels.activation import activate_triton
from hearth.kernels.decode_attention import decode_attention_triton
from hearth.kernels.linear import narrow_linear_triton, skinny_linear_triton
from hearth.kernels.norm import add_norm_triton
from hearth.kernels.paged import Heads
from hearth.kernels.quantized import quantized_skinny_triton
from hearth.kernels.rotary import rotate_and_store_triton
from tests.kernels.cases import Paged, random
from tests.kernels.test_decode_attention import scratch_for

FOLDER = Path(jit.__file__).parent
WRITES_MEMORY = ("tl.store", "tl.atomic_")
#: Arguments that kernels may use before they wait: numbers, and what no kernel of a step writes.
STEADY = {
    "positions",
    "slots",
    "table",
    "num_rows",
    "cos_sin",
    "weight",
    "delta_weight",
    "bias",
    "table_stride",
    "max_rows",
    "hidden",
    "shares",
    "target",
    "n",
    "k",
}


def overlapping_kernels() -> list[ast.FunctionDef]:
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.name == "overlap.py":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "OVERLAPS" in [arg.arg for arg in node.args.args]:
                found.append(node)
    return found


@pytest.mark.parametrize("kernel", overlapping_kernels(), ids=lambda kernel: kernel.name)
def test_every_program_waits_before_it_touches_what_a_step_writes(kernel: ast.FunctionDef) -> None:
    changing = {arg.arg for arg in kernel.args.args if not arg.arg.isupper()} - STEADY
    for statement in kernel.body:
        text = ast.unparse(statement)
        if text == "wait_for_inputs(OVERLAPS)":
            return
        assert not any(write in text for write in WRITES_MEMORY), f"in front of the wait: {text}"
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement)), f"not all wait: {text}"
        used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        assert not used & changing, f"in front of the wait: {text}"
    pytest.fail("never waits")


def test_a_step_begins_with_a_kernel_that_starts_when_all_before_it_has_ended() -> None:
    """Else kernels behind it could read lengths and blocks before they are there."""
    names = {kernel.name for kernel in overlapping_kernels()}
    assert {"_read_step_kernel", "_read_host_kernel"} <= names, "which write them"
    assert step_tokens._gather_tokens_kernel.__name__ not in names


def test_kernels_that_overlap_are_found() -> None:
    assert len(overlapping_kernels()) >= 7


class NotedKernel:
    """Stands in for a kernel, and notes how it is compiled."""

    arg_names = ("x", "OVERLAPS")

    def __init__(self) -> None:
        self.options: list[dict[str, object]] = []

    def warmup(self, *args: object, grid: tuple[int, ...], **options: object) -> None:
        self.options.append(options)


def test_a_kernel_overlaps_where_the_device_can_unless_it_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, x = NotedKernel(), torch.empty(1, device="meta")
    monkeypatch.setattr(jit, "can_overlap", lambda: True)
    jit.launch(kernel, (1,), x)
    jit.launch(kernel, (1,), x, OVERLAPS=False)
    monkeypatch.setattr(jit, "can_overlap", lambda: False)
    jit.launch(kernel, (1,), x)

    assert kernel.options == [
        {"OVERLAPS": True, "launch_pdl": True},
        {"OVERLAPS": False},
        {"OVERLAPS": False},
    ]


class Chain:
    """Layers whose every kernel reads what the one before wrote, and overwrites what that one read."""

    def __init__(self, num_layers: int) -> None:
        self.heads = Heads(4, 2, 64)
        lengths = [300]
        self.cache = Paged.build(lengths, self.heads, "cuda", torch.bfloat16)
        self.cache.fill(lengths)
        self.rows = self.cache.rows(torch.tensor(lengths, dtype=torch.int32, device="cuda") - 1)
        self.cos_sin = random(300, 2, 32, device="cuda")
        self.scratch = scratch_for(self.heads, "cuda", 528, 1)
        shapes = [(512, 256), (256, 256), (1400, 256), (256, 700)]
        self.layers = [
            [
                random(n, k, device="cuda", dtype=torch.bfloat16, seed=10 * layer + at) / k**0.5
                for at, (n, k) in enumerate(shapes)
            ]
            for layer in range(num_layers)
        ]
        self.eight_bit = (127 * random(256, 256, device="cuda").clamp(-1, 1)).to(torch.int8)
        self.scale = torch.full((256,), 0.002, device="cuda")
        self.norm_weight = random(256, device="cuda", dtype=torch.bfloat16, seed=5)
        self.x = random(1, 256, device="cuda", dtype=torch.bfloat16)
        sizes = {
            "residual": 256,
            "normed": 256,
            "qkv": 512,
            "attended": 256,
            "delta": 256,
            "up": 1400,
            "act": 700,
        }
        self.buffers = {
            name: torch.zeros(1, size, device="cuda", dtype=torch.bfloat16) for name, size in sizes.items()
        }

    def run(self) -> None:
        b = self.buffers
        b["residual"].copy_(self.x)
        b["delta"].zero_()
        for qkv, o, up, down in self.layers:
            add_norm_triton(
                b["delta"], b["residual"], self.norm_weight, None, 1e-5, is_rms=True, out=b["normed"]
            )  # fmt: skip
            skinny_linear_triton(b["normed"], qkv, None, out=b["qkv"])
            rotate_and_store_triton(
                b["qkv"], self.heads, self.rows, self.cache.kv, cos_sin=self.cos_sin, norms=None
            )
            decode_attention_triton(
                b["qkv"], self.heads, self.rows, self.cache.kv,
                window=None, scratch=self.scratch, out=b["attended"],
            )  # fmt: skip
            skinny_linear_triton(b["attended"], o, None, out=b["delta"])
            quantized_skinny_triton(b["delta"], self.eight_bit, self.scale, None, out=b["normed"])
            narrow_linear_triton(b["normed"], o, None, out=b["attended"])
            skinny_linear_triton(b["attended"], up, None, out=b["up"])
            activate_triton(b["up"], "silu", gated=True, out=b["act"])
            skinny_linear_triton(b["act"], down, None, out=b["delta"])


@pytest.mark.gpu
def test_overlapping_kernels_give_the_same_bits_eagerly_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(num_layers=12)
    # A step tells the next one its positions just before it begins, as here.
    expected = {}
    with monkeypatch.context() as patch:
        patch.setattr(jit, "can_overlap", lambda: False)
        for length in (300, 17, 192) * 2:  # what longer contexts read, shorter ones have written by then
            chain.rows.positions.fill_(length - 1)
            chain.run()
            expected[length] = chain.buffers["delta"].clone()
    assert all(delta.isfinite().all() for delta in expected.values())
    assert not torch.equal(expected[300], expected[17])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    for run in (chain.run, graph.replay):
        for length, delta in [*expected.items()] * 20:
            chain.buffers["delta"].fill_(7.0)
            chain.rows.positions.fill_(length - 1)
            run()
            assert torch.equal(chain.buffers["delta"], delta), f"{length=}"
