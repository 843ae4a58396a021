"""How near are the kernels of a decode step to what memory allows, alone and behind each other?

python -m bench.engine.decode_kernels [--only chain,elementwise,eight_bit,steps]

Prints a JSON line for each measurement. Every time is of launches inside a CUDA graph, over data that does
not fit the cache. Bounds count each byte of weights and KV once, at 4.2 TB/s.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from bench.engine.kernels import BF16, INT32, _paged
from bench.engine.timing import microseconds
from hearth.core.sizes import PROGRAMS_PER_PROCESSOR
from hearth.kernels import jit
from hearth.kernels.activation import activate
from hearth.kernels.decode_attention import SplitScratch, decode_attention_triton
from hearth.kernels.linear import linear
from hearth.kernels.norm import add_norm
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.quantized import quantized_skinny_triton
from hearth.kernels.rotary import rotate_and_store

TB_PER_S = 4.2


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers, of which a few stand for all."""

    name: str
    hidden: int
    intermediate: int
    heads: Heads
    vocab: int
    num_layers: int


LLAMA_7B = Shape("7B", 4096, 11008, Heads(32, 32, 128), 32000, 32)
LLAMA_8B = Shape("8B", 4096, 14336, Heads(32, 8, 128), 128256, 32)
SHAPES = [
    Shape("0.5B", 896, 4864, Heads(14, 2, 64), 151936, 24),
    Shape("1B", 2048, 8192, Heads(32, 8, 64), 128256, 16),
    Shape("3B", 3072, 8192, Heads(24, 8, 128), 128256, 28),
    Shape("gemma-2B", 2048, 16384, Heads(8, 1, 256), 256000, 18),
    LLAMA_8B,
    Shape("70B, 4 layers", 8192, 28672, Heads(64, 8, 128), 128256, 4),
]


def say(**fields: object) -> None:
    rounded = {name: round(x, 3) if isinstance(x, float) else x for name, x in fields.items()}
    print(json.dumps(rounded), flush=True)


def set_overlap(is_on: bool) -> None:
    jit.can_overlap = lambda: is_on


def scratch_for(heads: Heads, num_rows: int) -> SplitScratch:
    num_programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(0).multi_processor_count
    partials = 2 * num_programs * heads.num_q // heads.num_kv
    return SplitScratch(
        num_programs,
        torch.empty(partials * heads.dim, device="cuda"),
        torch.empty(partials * 2, device="cuda"),
        torch.zeros(num_rows * heads.num_kv, **INT32),
    )


class Chain:
    """The kernels of a decode step of some rows, in their order, over weights of their own for each layer."""

    def __init__(
        self, shape: Shape, num_rows: int, context: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.shape, self.num_rows, self.context, self.dtype = shape, num_rows, context, dtype
        #: Computes products of eight bits from x, weight and scale; None: the kernel for one row does.
        self.multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
        heads, hidden, inter = shape.heads, shape.hidden, shape.intermediate
        q_size, qkv_size = heads.num_q * heads.dim, (heads.num_q + 2 * heads.num_kv) * heads.dim
        self.layers = [
            [
                self._weight(n, k)
                for n, k in [(qkv_size, hidden), (hidden, q_size), (2 * inter, hidden), (hidden, inter)]
            ]
            for _ in range(shape.num_layers)
        ]
        self.head = self._weight(shape.vocab, hidden)
        self.kv, table = _paged([context] * num_rows, heads, shape.num_layers)
        self.rows = PagedRows(
            torch.full((num_rows,), context - 1, **INT32), torch.arange(num_rows, **INT32), table
        )
        self.scale = torch.full((max(shape.vocab, 2 * inter, qkv_size),), 0.01, device="cuda")
        self.norm = torch.ones(hidden, **BF16)
        self.cos_sin = torch.randn(context, 2, heads.dim // 2, device="cuda")
        self.scratch = scratch_for(heads, num_rows)
        self.x = torch.randn(num_rows, hidden, **BF16)
        sizes = {"residual": hidden, "normed": hidden, "qkv": qkv_size, "attended": q_size, "delta": hidden,
                 "up": 2 * inter, "act": inter, "logits": shape.vocab}  # fmt: skip
        self.buffers = {name: torch.zeros(num_rows, size, **BF16) for name, size in sizes.items()}

    def _weight(self, n: int, k: int) -> torch.Tensor:
        weight = torch.empty(n, k, **BF16).normal_(std=k**-0.5)
        return weight if self.dtype == torch.bfloat16 else (weight * 100).to(self.dtype)

    @property
    def memory_ms(self) -> float:
        """How long it takes to read all weights and KV once."""
        heads = self.shape.heads
        kv_bytes = 4 * self.num_rows * self.context * heads.num_kv * heads.dim * len(self.layers)
        return (
            (sum(w.nbytes for layer in self.layers for w in layer) + self.head.nbytes + kv_bytes)
            / TB_PER_S
            / 1e9
        )

    def step(self, attends: bool = True, block_n: int | None = None) -> None:
        b, heads = self.buffers, self.shape.heads
        b["residual"].copy_(self.x)
        delta = None
        for layer, (qkv, o, up, down) in enumerate(self.layers):
            kv = self.kv[:, layer]
            add_norm(delta, b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
            self._multiply(b["normed"], qkv, b["qkv"], block_n)
            if attends:
                rotate_and_store(b["qkv"], heads, self.rows, kv, cos_sin=self.cos_sin, norms=None)
                decode_attention_triton(
                    b["qkv"], heads, self.rows, kv, window=None, scratch=self.scratch, out=b["attended"]
                )
            self._multiply(b["attended"], o, b["delta"], block_n)
            add_norm(b["delta"], b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
            self._multiply(b["normed"], up, b["up"], block_n)
            activate(b["up"], "silu", gated=True, out=b["act"])
            self._multiply(b["act"], down, b["delta"], block_n)
            delta = b["delta"]
        add_norm(delta, b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
        self._multiply(b["normed"], self.head, b["logits"], block_n)

    def products(self) -> None:
        """The products of a step alone."""
        b = self.buffers
        for qkv, o, up, down in self.layers:
            self._multiply(b["normed"], qkv, b["qkv"])
            self._multiply(b["attended"], o, b["delta"])
            self._multiply(b["normed"], up, b["up"])
            self._multiply(b["act"], down, b["delta"])
        self._multiply(b["normed"], self.head, b["logits"])

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, block_n: int | None = None
    ) -> None:
        if self.dtype == torch.bfloat16:
            linear(x, weight, None, out=out)
        elif self.multiply is not None:
            self.multiply(x, weight, self.scale[: weight.shape[0]], out)
        else:
            scale = self.scale[: weight.shape[0]]
            quantized_skinny_triton(x, weight, scale, None, out=out, block_n=block_n)

    def measure(self, attends: bool = True, block_n: int | None = None) -> tuple[float, torch.Tensor]:
        """Return the milliseconds of a step, and its logits."""
        ms = microseconds([lambda: self.step(attends, block_n)]) / 1e3
        return ms, self.buffers["logits"].clone()


def chain() -> None:
    """Time one row through all layers: kernels one after the other, and overlapping."""
    for shape in (LLAMA_7B, LLAMA_8B):
        it = Chain(shape, 1, 192)
        expected = None
        for overlaps in (False, True):
            set_overlap(overlaps)
            ms, logits = it.measure()
            expected = logits if expected is None else expected
            say(
                part="chain",
                shape=shape.name,
                overlaps=overlaps,
                ms=ms,
                memory_ms=it.memory_ms,
                without_attention_ms=it.measure(attends=False)[0],
                products_ms=microseconds([it.products]) / 1e3,
                same_bits=bool(torch.equal(logits, expected)),
            )
        del it
        torch.cuda.empty_cache()


def eight_bit() -> None:
    """Time one row through layers of eight bits."""
    for dtype in (torch.int8, torch.float8_e4m3fn):
        it = Chain(replace(LLAMA_7B, num_layers=8), 1, 192, dtype)
        for block_n in (1, 2):
            for overlaps in (False, True):
                set_overlap(overlaps)
                found = [round(it.measure(block_n=block_n)[0], 4) for _ in range(3)]
                say(
                    part="eight_bit",
                    dtype=str(dtype),
                    block_n=block_n,
                    overlaps=overlaps,
                    ms=found,
                    memory_ms=it.memory_ms,
                )
        del it


def elementwise() -> None:
    set_overlap(True)
    tokens, hidden, inter, heads = 8192, 4096, 11008, Heads(32, 32, 128)
    x, delta, normed = (torch.randn(tokens, hidden, **BF16) for _ in range(3))
    weight, up = torch.ones(hidden, **BF16), torch.randn(tokens, 2 * inter, **BF16)
    act, qkv = torch.empty(tokens, inter, **BF16), torch.randn(tokens, 3 * hidden, **BF16)
    kv, table = _paged([tokens], heads, 1)
    rows = PagedRows(torch.arange(tokens, **INT32), torch.zeros(tokens, **INT32), table)
    cos_sin = torch.randn(tokens, 2, 64, device="cuda")
    cases: dict[str, tuple[Callable[[], None], int]] = {
        "norm": (lambda: add_norm(delta, x, weight, None, 1e-5, is_rms=True, out=normed), 4 * x.nbytes),
        "activation": (lambda: activate(up, "silu", gated=True, out=act), up.nbytes + act.nbytes),
        "rotary": (
            lambda: rotate_and_store(qkv, heads, rows, kv[:, 0], cos_sin=cos_sin, norms=None),
            qkv.nbytes * 7 // 3,  # q, k and v are read, q and k written, k and v written to the cache
        ),
    }
    for name, (call, num_bytes) in cases.items():
        us = microseconds([call] * 10)
        say(part="elementwise", kernel=name, tokens=tokens, us=us, tb_per_s=num_bytes / us / 1e6)


def steps() -> None:
    """Time decode steps of one and of 64 rows of many shapes beside memory alone and products alone."""
    set_overlap(True)
    for shape in SHAPES:
        for num_rows in (1, 64):
            it = Chain(shape, num_rows, 256)
            ms, logits = it.measure()
            alone = microseconds([it.products]) / 1e3
            say(
                part="steps", shape=shape.name, rows=num_rows, ms=ms, memory_ms=it.memory_ms,
                products_ms=alone, is_finite=bool(logits.isfinite().all()),
            )  # fmt: skip
            del it
            torch.cuda.empty_cache()


PARTS = {part.__name__: part for part in (chain, elementwise, eight_bit, steps)}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    run([PARTS[name] for name in parser.parse_args().only.split(",")])


def run(parts: Iterable[Callable[[], None]]) -> None:
    """Run parts one after the other, and exit with 1 behind the last if one has failed."""
    has_failed = False
    for part in parts:
        begin = time.monotonic()
        try:
            part()
        except Exception:  # the other parts are worth having
            say(part=part.__name__, error=traceback.format_exc()[-1500:])
            has_failed = True
        say(part=part.__name__, seconds=time.monotonic() - begin)
        torch.cuda.empty_cache()
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
