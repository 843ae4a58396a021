"""Which tiles are best for decode attention, and how many heads should a program of the rotary kernel have?

python -m bench.engine.attention_tiles [--only rotary,attention,empty]

Prints a JSON line for each measurement, with the tile that is used first. Kernels run as in a step: behind a
kernel that does not let them start early, and with none of their data in the cache. Bounds are as in
`decode_kernels`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from random import Random

import torch
from triton.runtime.errors import OutOfResources

from bench.engine.decode_kernels import TB_PER_S, run, say
from bench.engine.timing import microseconds
from bench.sharegpt import conversations
from hearth.core.sizes import PROGRAMS_PER_PROCESSOR, num_subgroups
from hearth.engine.compile import compile_each
from hearth.kernels.decode_attention import SplitScratch, TileShape, decode_attention_triton, tile_shape
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.rotary import heads_per_program, rotate_and_store_triton
from hearth.kernels.variants import TargetDriver, recording

#: Written between attentions: more than the cache holds.
FLUSHED_BYTES = 64 << 20
NUM_PROCESSORS, CAPABILITY = 132, 90  # an H200
NUM_LAYERS = 16

HEADS = {
    "1B": Heads(32, 8, 64),
    "256k": Heads(8, 1, 256),
    "falcon": Heads(71, 1, 64),
    "0.5B": Heads(14, 2, 64),
    "8B": Heads(32, 8, 128),
    "7B": Heads(32, 32, 128),
}


def ragged(count: int) -> list[int]:
    """Contexts of requests in the midst of conversations."""
    random = Random(3)
    return [one.prompt + random.randrange(one.new) for one in conversations()[1000 : 1000 + count]]


LENGTHS = {
    "1 x 200": [200],
    "1 x 2000": [2000],
    "8 x 200": [200] * 8,
    "64 x 200": [200] * 64,
    "64 ragged": ragged(64),
    "64 x 2000": [2000] * 64,
    "256 x 200": [200] * 256,
    "256 ragged": ragged(256),
    "40 x 128, 8192, 23 x 128": [128] * 40 + [8192] + [128] * 23,
}
#: Tiles beside the one that is used, by the heads' size, and for many query heads that share k and v.
TILES = {
    64: [TileShape(64, 2, 3), TileShape(64, 2, 2), TileShape(128, 4, 2, 168, 3)],
    128: [TileShape(32, 4, 3, 128), TileShape(32, 2, 3), TileShape(64, 4, 2, 168, 3)],
    256: [TileShape(16, 4, 2, 128), TileShape(32, 4, 2, None, 2), TileShape(64, 8, 2, 128, 2)],
}
TILES_OF_MANY = [TileShape(64, 4, 2, None, 3), TileShape(64, 4, 3, 168, 2), TileShape(64, 4, 2)]
#: Heads of a program of the rotary kernel.
HEADS_PER_PROGRAM = [8, 16, 32]
NUM_TOKENS = [1, 64, 256, 2048, 8192]


def tiles(heads: Heads) -> list[TileShape]:
    """The tile that is used, and others."""
    others = TILES_OF_MANY if heads.num_q // heads.num_kv > 16 else TILES[heads.dim]
    used = tile_shape(heads, torch.bfloat16)
    return [used, *(tile for tile in others if tile != used)]


def per_program(heads: Heads) -> list[int]:
    """The number of heads that is used, and others."""
    used = heads_per_program(heads)
    return [used, *(count for count in HEADS_PER_PROGRAM if count != used)]


class Layers:
    """Rows of some lengths in layers that follow each other; with `num_tokens` a prompt of so many."""

    def __init__(self, heads: Heads, lengths: list[int], device: str, num_tokens: int | None = None) -> None:
        self.heads, self.device = heads, device
        int32 = {"device": device, "dtype": torch.int32}
        bf16 = {"device": device, "dtype": torch.bfloat16}
        blocks = [-(-length // 16) for length in lengths]
        self.kv = torch.randn(sum(blocks) + 1, NUM_LAYERS, 2, 16, heads.num_kv, heads.dim, **bf16)
        table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, own in enumerate((torch.randperm(sum(blocks)) + 1).int().split(blocks)):
            table[row, : len(own)] = own
        slots = torch.arange(len(lengths), **int32)
        positions = torch.tensor(lengths, dtype=torch.int32).to(device) - 1
        if num_tokens is not None:
            slots, positions = torch.zeros(num_tokens, **int32), torch.arange(num_tokens, **int32)
        self.rows = PagedRows(positions, slots, table.to(device))
        count = len(positions)
        self.count = torch.full((1,), count, **int32)
        self.qkv = torch.randn(count, (heads.num_q + 2 * heads.num_kv) * heads.dim, **bf16)
        self.given = self.qkv.clone()
        self.out = torch.empty(count, heads.num_q * heads.dim, **bf16)
        angles = torch.randn(max(lengths), heads.dim // 2, device=device)
        self.cos_sin = torch.stack([angles.cos(), angles.sin()], 1)
        self.flushed = torch.empty(FLUSHED_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)
        group, num_programs = heads.num_q // heads.num_kv, PROGRAMS_PER_PROCESSOR * NUM_PROCESSORS
        self.scratch = SplitScratch(
            num_programs,
            torch.empty(2 * num_programs * group * heads.dim, device=device),
            torch.empty(2 * num_programs * group * 2, device=device),
            torch.zeros(count * heads.num_kv * num_subgroups(group), **int32),
        )

    def rotate(self, layer: int, per_program: int | None = None) -> None:
        rotate_and_store_triton(
            self.qkv, self.heads, self.rows, self.kv[:, layer],
            cos_sin=self.cos_sin, norms=None, per_program=per_program,
        )  # fmt: skip

    def attend(self, layer: int, tile: TileShape) -> None:
        decode_attention_triton(
            self.qkv, self.heads, self.rows, self.kv[:, layer],
            window=None, scratch=self.scratch, out=self.out, num_rows=self.count, shape=tile,
        )  # fmt: skip

    def attended(self, tile: TileShape) -> torch.Tensor:
        """Return the first layer's result for what was given, which was rotated many times since."""
        self.qkv.copy_(self.given)
        self.attend(0, tile)
        return self.out.float()

    def microseconds(self, *launches: Callable[[int], None]) -> float:
        """Return the time of a layer in which the cache is flushed, and then this is launched."""

        def layer(index: int) -> None:
            self.flushed.fill_(index)
            for launch in launches:
                launch(index)

        return microseconds([lambda index=index: layer(index) for index in range(NUM_LAYERS)])


def attention() -> None:
    """Time decode attention behind the rotary kernel, beyond the time of that."""
    for name, heads in HEADS.items():
        for lengths_name, lengths in LENGTHS.items():
            bound_us = 4 * sum(lengths) * heads.num_kv * heads.dim / TB_PER_S / 1e6
            us = _by_tile(Layers(heads, lengths, "cuda"))
            say(part="attention", shape=name, lengths=lengths_name, bound_us=bound_us, us=us)
            torch.cuda.empty_cache()


def _by_tile(layers: Layers) -> dict[str, object]:
    """Return the time of each tile, or why there is none."""
    without_us, expected = layers.microseconds(layers.rotate), None
    found = dict[str, object]()
    for tile in tiles(layers.heads):
        try:
            out = layers.attended(tile)
            us = layers.microseconds(layers.rotate, partial(layers.attend, tile=tile)) - without_us
        except OutOfResources as error:
            found[_short(tile)] = str(error)[:60]
            continue
        expected = out if expected is None else expected
        difference = float((out - expected).norm() / expected.norm())
        found[_short(tile)] = round(us, 2) if difference < 0.01 else f"{difference=}"
    return found


def _short(tile: TileShape) -> str:
    registers = "" if tile.max_registers is None else f", {tile.max_registers} registers"
    shape = f"{tile.block_n} tokens, {tile.num_warps} warps, {tile.num_stages} stages"
    return f"{shape}{registers}, {tile.per_processor} programs"


def empty() -> None:
    """Time decode attention in steps where few of the rows that may decode do."""
    layers = Layers(HEADS["8B"], [16] * 1024, "cuda")
    tile = tile_shape(layers.heads, torch.bfloat16)
    without_us = layers.microseconds(layers.rotate)
    for there in (0, 1, 64):
        layers.count.fill_(there)
        us = layers.microseconds(layers.rotate, partial(layers.attend, tile=tile))
        say(part="empty", rows=there, us=us - without_us)


def rotary() -> None:
    """Time the rotary kernel of decode rows and of prompts."""
    for name, heads in HEADS.items():
        for num_tokens in NUM_TOKENS:
            layers = Layers(heads, [num_tokens], "cuda", num_tokens)
            without_us, us = layers.microseconds(), dict[int, float]()
            for count in per_program(heads):
                whole_us = layers.microseconds(partial(layers.rotate, per_program=count))
                us[count] = round(whole_us - without_us, 2)
            # q, k and v are read; q is written, and k and v are to the cache.
            bound_us = 2 * layers.qkv.nbytes / TB_PER_S / 1e6
            say(part="rotary", shape=name, tokens=num_tokens, bound_us=bound_us, us_by_heads=us)
            torch.cuda.empty_cache()


def compile_ahead() -> None:
    """Compile all kernels on all cores, to be found in Triton's cache later. Touches no device."""
    TargetDriver(CAPABILITY).activate()
    begin = time.monotonic()
    with recording() as variants:
        for heads in HEADS.values():
            layers = Layers(heads, [16], "meta")
            for tile in tiles(heads):
                layers.attend(0, tile)
            for count in per_program(heads):
                layers.rotate(0, count)
    done = compile_each(variants)
    num_failed = sum(variant is None for variant, _ in done)
    say(part="compile", variants=len(variants), failed=num_failed, seconds=time.monotonic() - begin)


PARTS = {part.__name__: part for part in (rotary, attention, empty)}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run")
    parser.add_argument("--compile", action="store_true", help="compile all kernels and run none")
    options = parser.parse_args()
    if options.compile:
        compile_ahead()
        return
    # Processes that compile end with their standard input.
    with subprocess.Popen([sys.executable, "-m", __spec__.name, "--compile"], stdin=subprocess.PIPE) as ahead:
        ahead.wait()
    run([PARTS[name] for name in options.only.split(",")])


if __name__ == "__main__":
    main()
