"""How fast is attention over prompts in paged KV, for lengths and heads as they occur? bf16, one layer.

Called by bench.engine.kernels. Every time is of one launch inside a CUDA graph of several.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf

import torch

from bench.engine.timing import microseconds
from bench.report import tell
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_attention import (
    PromptTileShape,
    prefill_attention_triton,
    prompt_kernel,
    prompt_tile_tokens,
)
from hearth.kernels.prefill_hopper import hopper_tile_tokens, prefill_attention_hopper
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles

DEVICE = "cuda"
BF16 = {"device": DEVICE, "dtype": torch.bfloat16}
INT32 = {"device": DEVICE, "dtype": torch.int32}
BLOCK_TOKENS = 16
#: KV of so many layers lies between the blocks of one.
LAYERS = 8
#: By name: of each sequence the tokens that are in KV already, and those of the step.
CASES: dict[str, list[tuple[int, int]]] = {
    "prompt of 3,500": [(0, 3500)],
    "4,096 after 4,096": [(4096, 4096)],
    "2,904 after 596, 1,192": [(596, 2904), (0, 1192)],
    "596, 596 after 2,904": [(0, 596), (2904, 596)],
    "16 of 256": [(0, 256)] * 16,
    "64 of 64 after 1,024": [(1024, 64)] * 64,
    "4,096 after 28,672": [(28672, 4096)],
    "prompt of 128": [(0, 128)],
    "mixed": [(0, 20 + 173 * at % 900) for at in range(16)],
    "no prompts": [],
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and the window of a model's layer."""

    heads: Heads
    window: int | None = None

    @property
    def name(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.heads.num_q}/{self.heads.num_kv} heads of {self.heads.dim}{window}"


SHAPES = [
    Shape(Heads(16, 16, 256)),
    Shape(Heads(32, 8, 64)),
    Shape(Heads(32, 8, 128), 1024),
    Shape(Heads(32, 32, 128)),
    Shape(Heads(32, 8, 128)),
    Shape(Heads(14, 2, 64)),
    Shape(Heads(32, 32, 80)),
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to launch one of the kernels."""

    name: str
    tile_tokens: int
    tile: PromptTileShape | None = None  #: of the Triton kernel; None: the kernel for Hopper
    num_stages: int | None = None  #: of the kernel for Hopper
    max_programs: int | None = None

    def attend(self, step: Step, tiles: PromptTiles) -> None:
        args = (step.qkv, step.shape.heads, step.rows, tiles, step.kv)
        if self.tile is None:
            prefill_attention_hopper(
                *args,
                window=step.shape.window,
                out=step.out,
                num_stages=self.num_stages,
                max_programs=self.max_programs,
            )
        else:
            prefill_attention_triton(
                *args,
                window=step.shape.window,
                out=step.out,
                shape=self.tile,
                max_programs=self.max_programs,
            )


def served(heads: Heads, num_rows: int) -> Candidate:
    """Return what the engine would launch."""
    tile_tokens = prompt_tile_tokens(heads, torch.bfloat16, num_rows)
    if prompt_kernel(heads, torch.bfloat16).name == "hopper":
        return Candidate("hopper, served", tile_tokens)
    return Candidate("triton, served", tile_tokens, PromptTileShape.of(heads, tile_tokens, num_rows))


def candidates(heads: Heads) -> Iterator[Candidate]:
    """Yield all that might be served."""
    is_even = heads.num_q // heads.num_kv % 2 == 0
    if prompt_kernel(heads, torch.bfloat16).name == "hopper":
        yield Candidate("hopper", hopper_tile_tokens(heads))
        if heads.dim == 64:
            yield Candidate("hopper, 3 stages", hopper_tile_tokens(heads), num_stages=3)
    if heads.dim > 128:
        yield Candidate("triton 64x64", 64, PromptTileShape(1, 64, 8, 2))
        yield Candidate("triton 128x64", 128, PromptTileShape(1, 64, 8, 2))
        yield Candidate("triton 128x32", 128, PromptTileShape(1, 32, 8, 3))
        return
    yield Candidate("triton 64x64", 64, PromptTileShape(1, 64, 4, 3))
    yield Candidate("triton 128x64", 128, PromptTileShape(1, 64, 8, 3))
    if is_even:
        yield Candidate("triton 2 heads x 64 x 128", 64, PromptTileShape(2, 128, 8, 3))
        yield Candidate("triton 2 heads x 64 x 64", 64, PromptTileShape(2, 64, 8, 3))
    else:
        yield Candidate("triton 128x128", 128, PromptTileShape(1, 128, 8, 3))


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of attention for one case."""

    shape: Shape
    chunks: Sequence[tuple[int, int]]
    spans: Sequence[PrefillSpan]
    rows: PagedRows
    qkv: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def build(shape: Shape, chunks: Sequence[tuple[int, int]], kv: torch.Tensor) -> Step:
        """Lay sequences into blocks of `kv` at random, which has been filled."""
        heads = shape.heads
        order = iter(torch.randperm(len(kv)).tolist())
        num_blocks = [-(-(start + count) // BLOCK_TOKENS) for start, count in chunks]
        table = torch.zeros(len(chunks) + 1, max(num_blocks, default=1), dtype=torch.int32)
        for row, number in enumerate(num_blocks):
            table[row, :number] = torch.tensor(list(itertools.islice(order, number)))
        spans, begin = [], 0
        slots, positions = [], []
        for slot, (start, count) in enumerate(chunks):
            spans.append(PrefillSpan(begin, count, start))
            slots += [slot] * count
            positions += range(start, start + count)
            begin += count
        num_rows = begin or 128
        pad = [0] * (num_rows - begin)
        rows = PagedRows(
            torch.tensor(positions + pad, **INT32), torch.tensor(slots + pad, **INT32), table.to(DEVICE)
        )
        qkv = torch.randn(num_rows, (heads.num_q + 2 * heads.num_kv) * heads.dim, **BF16)
        out = torch.zeros(num_rows, heads.num_q * heads.dim, **BF16)
        return Step(shape, chunks, spans, rows, qkv, kv, out)

    @property
    def num_flops(self) -> float:
        window = self.shape.window or inf
        num_pairs = sum(
            min(position + 1, window)
            for start, count in self.chunks
            for position in range(start, start + count)
        )
        return 4 * self.shape.heads.dim * self.shape.heads.num_q * num_pairs

    def tiles(self, tile_tokens: int) -> PromptTiles:
        """Cut the spans into a list that has room for as many tiles again."""
        tiles = PromptTiles.of(self.spans, tile_tokens, DEVICE)
        items = torch.zeros(2 * len(tiles.items) + 128, tiles.items.shape[1], **INT32)
        items[: len(tiles.items)] = tiles.items
        return replace(tiles, items=items)

    def error(self) -> float:
        """Return how far the first and the last head are from attention in float32, at most."""
        heads, found = self.shape.heads, 0.0
        for (span, row), head in itertools.product(
            zip(self.spans, self.rows.block_table, strict=False), (0, heads.num_q - 1)
        ):
            end = span.start + span.num_tokens
            blocks = row[: -(-end // BLOCK_TOKENS)].long()
            kv_head = head // (heads.num_q // heads.num_kv)
            k, v = (self.kv[blocks, side, :, kv_head].flatten(0, 1)[:end].float() for side in (0, 1))
            columns = slice(head * heads.dim, (head + 1) * heads.dim)
            score = self.qkv[span.rows, columns].float() @ k.T * heads.dim**-0.5
            back = torch.arange(span.start, end, device=DEVICE)[:, None] - torch.arange(end, device=DEVICE)
            unseen = back < 0
            if self.shape.window is not None:
                unseen |= back >= self.shape.window
            expected = score.masked_fill_(unseen, -inf).softmax(-1) @ v
            found = max(found, float((self.out[span.rows, columns].float() - expected).abs().max()))
        return found


def prefill(*, tries_all: bool) -> list[dict[str, object]]:
    """Measure what is served, or with `tries_all` every candidate."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if tries_all:
        _compile_beforehand()
    found: list[dict[str, object]] = []
    for shape in SHAPES:
        heads = shape.heads
        kv = torch.empty(5000, LAYERS, 2, BLOCK_TOKENS, heads.num_kv, heads.dim, **BF16)[:, 1]
        kv.normal_()
        for name, chunks in CASES.items():
            step = Step.build(shape, chunks, kv)
            tried = candidates(heads) if tries_all else [served(heads, len(step.qkv))]
            for candidate in tried:
                row = {"shape": shape.name, "case": name, "kernel": candidate.name}
                try:
                    row |= _measure(step, candidate)
                except Exception as error:  # one that fails must not cost the others
                    row["failed"] = f"{type(error).__name__}: {str(error)[-300:]}"
                found.append(row)
        del kv
        for name in dict.fromkeys(str(row["kernel"]) for row in found):
            rows = [row for row in found if row["shape"] == shape.name and row["kernel"] == name]
            if rows:
                tell(f"{shape.name} | {name} | " + " ".join(map(_brief, rows)))
    return found


def _measure(step: Step, candidate: Candidate) -> dict[str, object]:
    tiles = step.tiles(candidate.tile_tokens)
    candidate.attend(step, tiles)
    error = step.error()
    us = microseconds([lambda: candidate.attend(step, tiles)] * 6)
    return {"us": round(us, 1), "tflops": round(step.num_flops / us / 1e6, 1), "max_error": round(error, 5)}


def _brief(row: dict[str, object]) -> str:
    if "failed" in row:
        return str(row["failed"])
    bad = "" if float(str(row["max_error"])) < 0.02 else f" ERROR {row['max_error']}"
    return f"{row['us']}/{row['tflops']}{bad}"


def _compile_beforehand() -> None:
    """Fill Triton's cache by several processes, for one alone would compile for minutes."""
    jobs = [
        (shape, candidate)
        for shape in SHAPES
        for candidate in candidates(shape.heads)
        if candidate.max_programs is None
    ]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        for failure in pool.map(_compile, jobs):
            if failure is not None:
                tell(failure)


def _compile(job: tuple[Shape, Candidate]) -> str | None:
    shape, candidate = job
    heads = shape.heads
    kv = torch.zeros(32, LAYERS, 2, BLOCK_TOKENS, heads.num_kv, heads.dim, **BF16)[:, 1]
    step = Step.build(shape, [(0, 200)], kv)
    try:
        candidate.attend(step, step.tiles(candidate.tile_tokens))
    except Exception as error:  # told here, and again by the measurement
        return f"{shape.name}, {candidate.name}: {type(error).__name__}: {str(error)[-500:]}"
    return None
