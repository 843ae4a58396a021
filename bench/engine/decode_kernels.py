"""How near are the kernels of a decode step to what memory allows, alone and behind each other?

python -m bench.engine.decode_kernels [--only chain,attention,elementwise,eight_bit,steps]

Prints a JSON line for each measurement. Every time is of launches inside a CUDA graph, over data that does
not fit the cache. Bounds count each byte of weights and KV once, at 4.2 TB/s.
"""

from __future__ import annotations

import json
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from bench.engine.kernels import BF16, INT32, _paged, microseconds
from hearth.kernels import jit, rotary
from hearth.kernels.activation import activate
from hearth.kernels.decode_attention import SplitScratch, TileShape, decode_attention_triton
from hearth.kernels.linear import linear, skinny_linear_triton
from hearth.kernels.norm import add_norm
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.quantized import quantized_skinny_triton
from hearth.kernels.rotary import rotate_and_store

TB_PER_S = 4.2
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


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


def library(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    linear(x, weight, None, out=out)


def scratch_for(heads: Heads, num_rows: int, per_processor: int = 4) -> SplitScratch:
    num_programs = per_processor * torch.cuda.get_device_properties(0).multi_processor_count
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
        self.shape, self.num_rows, self.context, self.dtype, self.ahead = shape, num_rows, context, dtype, 0
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
    def num_bytes(self) -> int:
        """Bytes of weights and KV that a step reads."""
        weights = sum(w.nbytes for layer in self.layers for w in layer) + self.head.nbytes
        return (
            weights
            + 4
            * self.num_rows
            * self.context
            * self.shape.heads.num_kv
            * self.shape.heads.dim
            * len(self.layers)
        )

    def step(self, product: Product = library, attends: bool = True) -> None:
        b, heads = self.buffers, self.shape.heads

        def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            if self.dtype == torch.bfloat16:
                product(x, weight, out)
            else:
                quantized_skinny_triton(
                    x, weight, self.scale[: weight.shape[0]], None, out=out, ahead=self.ahead
                )

        b["residual"].copy_(self.x)
        delta = None
        for layer, (qkv, o, up, down) in enumerate(self.layers):
            kv = self.kv[:, layer]
            add_norm(delta, b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
            multiply(b["normed"], qkv, b["qkv"])
            if attends:
                rotate_and_store(b["qkv"], heads, self.rows, kv, cos_sin=self.cos_sin, norms=None)
                decode_attention_triton(
                    b["qkv"], heads, self.rows, kv, window=None, scratch=self.scratch, out=b["attended"]
                )
            multiply(b["attended"], o, b["delta"])
            add_norm(b["delta"], b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
            multiply(b["normed"], up, b["up"])
            activate(b["up"], "silu", gated=True, out=b["act"])
            multiply(b["act"], down, b["delta"])
            delta = b["delta"]
        add_norm(delta, b["residual"], self.norm, None, 1e-5, is_rms=True, out=b["normed"])
        multiply(b["normed"], self.head, b["logits"])

    def products(self, product: Product = library) -> None:
        b = self.buffers
        for qkv, o, up, down in self.layers:
            product(b["normed"], qkv, b["qkv"])
            product(b["attended"], o, b["delta"])
            product(b["normed"], up, b["up"])
            product(b["act"], down, b["delta"])
        product(b["normed"], self.head, b["logits"])

    def measure(self, **choice: object) -> tuple[float, torch.Tensor]:
        ms = microseconds([lambda: self.step(**choice)]) / 1e3  # type: ignore[arg-type]
        return ms, self.buffers["logits"].clone()


def skinny(**choice: int) -> Product:
    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        skinny_linear_triton(x, weight, None, out=out, **choice)

    return product


AHEADS = [
    (0, 0),
    (16384, 1584),
    (16384, 1056),
    (16384, 528),
    (8192, 1584),
    (4096, 1584),
    (32768, 1056),
    (8192, 2112),
]
CHOICES = [
    {"block_n": 1},
    {"block_n": 4},
    {"block_k": 512},
    {"block_k": 2048},
    {"num_warps": 2},
    {"num_warps": 8},
    {"block_n": 1, "num_warps": 2},
    {"block_n": 4, "num_warps": 8},
]


def chain() -> None:
    """Time one row through all layers, by how kernels overlap and how much of a weight they fetch ahead."""
    for shape in (LLAMA_7B, LLAMA_8B):
        it = Chain(shape, 1, 192)
        bound = it.num_bytes / TB_PER_S / 1e9
        expected = None
        for is_on in (False, True):
            set_overlap(is_on)
            for ahead, num_ahead in AHEADS[: (8 if shape is LLAMA_7B else 3) if is_on else 1]:
                product = skinny(ahead=ahead, num_ahead=num_ahead)
                ms, logits = it.measure(product=product)
                expected = logits if expected is None else expected
                say(
                    part="chain",
                    shape=shape.name,
                    overlaps=is_on,
                    ahead=ahead,
                    num_ahead=num_ahead,
                    ms=ms,
                    bound_ms=bound,
                    same_bits=bool(torch.equal(logits, expected)),
                )
            ms, _ = it.measure(product=skinny(ahead=0), attends=False)
            products_ms = microseconds([lambda it=it: it.products(skinny(ahead=0))]) / 1e3
            say(part="chain", shape=shape.name, overlaps=is_on, attends=False, ms=ms, products_ms=products_ms)
        for choice in CHOICES if shape is LLAMA_7B else []:
            ms, _ = it.measure(product=skinny(ahead=0, **choice))
            say(part="chain", shape=shape.name, overlaps=True, ahead=0, **choice, ms=ms)
        del it
        torch.cuda.empty_cache()


def eight_bit() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        it = Chain(replace(LLAMA_7B, num_layers=8), 1, 192, dtype)
        bound = it.num_bytes / TB_PER_S / 1e9
        for is_on in (False, True):
            for ahead in (0, 8192)[: 2 if is_on else 1]:
                set_overlap(is_on)
                it.ahead = ahead
                ms, _ = it.measure()
                say(part="eight_bit", dtype=str(dtype), overlaps=is_on, ahead=ahead, ms=ms, bound_ms=bound)


def attention_case(
    heads: Heads, num_rows: int, context: int, window: int | None = None
) -> Callable[..., dict[str, float]]:
    """Return a function that times a launch with a tile shape, over as many layers as the cache does not hold."""
    seen = context if window is None else min(window, context)
    bytes_read = 4 * num_rows * seen * heads.num_kv * heads.dim
    layers = max(2, min(32, -(-600_000_000 // bytes_read)))
    kv, table = _paged([context] * num_rows, heads, layers)
    rows = PagedRows(torch.full((num_rows,), context - 1, **INT32), torch.arange(num_rows, **INT32), table)
    qkv = torch.randn(num_rows, (heads.num_q + 2 * heads.num_kv) * heads.dim, **BF16)
    out = torch.empty(num_rows, heads.num_q * heads.dim, **BF16)

    def measure(
        shape: TileShape | None,
        per_processor: int,
        num_rows_there: torch.Tensor | None = None,
        impl: object = None,
    ) -> dict[str, float]:
        scratch = scratch_for(heads, num_rows, per_processor)
        attend = decode_attention_triton if impl is None else impl.decode_attention_triton
        extra = {} if impl else {"shape": shape}

        def launch(layer: int) -> None:
            attend(
                qkv,
                heads,
                rows,
                kv[:, layer],
                window=window,
                scratch=scratch,
                out=out,
                num_rows=num_rows_there,
                **extra,
            )

        us = microseconds([lambda layer=layer: launch(layer) for layer in range(layers)])
        return {"us": us, "tb_per_s": bytes_read / us / 1e6}

    return measure


MHA_SHAPES = [
    ((32, 2, 1, False, 128), 8), ((16, 2, 1, False, 128), 8), ((64, 2, 1, False), 5), ((64, 4, 2), 4), ((32, 2, 2), 6),
    ((64, 2, 2), 4), ((32, 4, 2), 4), ((32, 2, 1, False), 6),
]  # fmt: skip
DOT_SHAPES = [((64, 4, 2), 4), ((32, 2, 2), 6), ((64, 2, 2), 4), ((32, 4, 2), 4), ((16, 2, 3, True, 128), 8)]


def attention() -> None:
    from bench.engine import old_decode

    set_overlap(True)
    everywhere = [(1, 192), (1, 4096), (16, 512), (64, 192), (256, 192), (64, 2048)]
    for heads, cases, shapes in (
        (Heads(32, 32, 128), everywhere, MHA_SHAPES),
        (Heads(32, 8, 128), everywhere, DOT_SHAPES),
        (Heads(14, 2, 64), [(1, 512), (64, 512), (256, 512)], DOT_SHAPES),
        (Heads(8, 1, 256), [(1, 512), (256, 512)], [((32, 4, 2), 4), ((16, 4, 2), 4), ((32, 8, 2), 4), ((32, 4, 2), 2)]),
    ):  # fmt: skip
        for num_rows, context in cases:
            measure = attention_case(heads, num_rows, context)
            found = []
            for shape, per_processor in [(None, 4), *shapes]:
                try:
                    us = measure(
                        shape and TileShape(*shape), per_processor, impl=None if shape else old_decode
                    )["us"]
                    found.append([shape, per_processor, round(us, 1)])
                except Exception as e:  # a shape that does not fit is a result
                    found.append([shape, per_processor, str(e)[:100]])
            say(
                part="attention",
                heads=(heads.num_q, heads.num_kv, heads.dim),
                rows=num_rows,
                context=context,
                bound_us=4 * num_rows * context * heads.num_kv * heads.dim / 4.1e6,
                found=found,
            )
            del measure
            torch.cuda.empty_cache()
    measure = attention_case(Heads(32, 32, 128), 256, 16)
    for is_on in (True, False):
        set_overlap(is_on)
        for there in (0, 1):
            count = torch.tensor([there], **INT32)
            found = [round(measure(TileShape(64, 4, 2), n, count)["us"], 2) for n in (1, 2, 4)]
            say(
                part="empty",
                overlaps=is_on,
                there=there,
                by_programs=found,
                old=measure(None, 4, count, impl=old_decode)["us"],
            )
    set_overlap(True)
    ragged()


def ragged() -> None:
    """Time rows of very different lengths: one of 8,192 tokens among 63 of 128."""
    for heads in (Heads(32, 32, 128), Heads(32, 8, 128)):
        lengths = [128] * 40 + [8192] + [128] * 23
        kv, table = _paged(lengths, heads, 4)
        rows = PagedRows(torch.tensor(lengths, **INT32) - 1, torch.arange(64, **INT32), table)
        qkv = torch.randn(64, (heads.num_q + 2 * heads.num_kv) * heads.dim, **BF16)
        out, scratch = torch.empty(64, heads.num_q * heads.dim, **BF16), scratch_for(heads, 64)

        def launch(layer: int) -> None:
            decode_attention_triton(qkv, heads, rows, kv[:, layer], window=None, scratch=scratch, out=out)  # noqa: B023

        us = microseconds([lambda layer=layer: launch(layer) for layer in range(4)])
        say(
            part="ragged",
            kv_heads=heads.num_kv,
            us=us,
            tb_per_s=4 * sum(lengths) * heads.num_kv * heads.dim / us / 1e6,
        )


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
        "rotary": (lambda: rotate_and_store(qkv, heads, rows, kv[:, 0], cos_sin=cos_sin, norms=None), qkv.nbytes * 2),
    }  # fmt: skip
    for name, (call, num_bytes) in cases.items():
        us = microseconds([call] * 10)
        say(part="elementwise", kernel=name, tokens=tokens, us=us, tb_per_s=num_bytes / us / 1e6)
    for rotary._HEADS_PER_PROGRAM in (16, 32, 8):
        us = microseconds([cases["rotary"][0]] * 10)
        say(part="elementwise", kernel="rotary", heads_per_program=rotary._HEADS_PER_PROGRAM, us=us)


def steps() -> None:
    """Time decode steps of one and of 64 rows of many shapes beside their bounds: memory, or products alone."""
    set_overlap(True)
    for shape in SHAPES:
        for num_rows in (1, 64):
            it = Chain(shape, num_rows, 256)
            ms, logits = it.measure()
            alone = microseconds([it.products]) / 1e3
            say(
                part="steps", shape=shape.name, rows=num_rows, ms=ms, memory_ms=it.num_bytes / TB_PER_S / 1e9,
                products_ms=alone, is_finite=bool(logits.isfinite().all()),
            )  # fmt: skip
            del it
            torch.cuda.empty_cache()


PARTS = {part.__name__: part for part in (chain, attention, elementwise, eight_bit, steps)}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    run([PARTS[name] for name in parser.parse_args().only.split(",")])


def run(parts: Iterable[Callable[[], None]]) -> None:
    for part in parts:
        begin = time.monotonic()
        try:
            part()
        except Exception:  # the other parts are worth having
            say(part=part.__name__, error=traceback.format_exc()[-1500:])
        say(part=part.__name__, seconds=time.monotonic() - begin)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
