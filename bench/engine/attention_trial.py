"""Which tiles are best for decode attention over short and ragged contexts? A trial of several kernels.

python -m bench.engine.attention_trial
"""

from __future__ import annotations

import subprocess
import sys
import time
from random import Random

import torch

from bench.engine import decode_attention_before, decode_attention_hint
from bench.engine.decode_kernels import Attention, say, scratch_for
from bench.engine.timing import microseconds
from bench.sharegpt import conversations
from hearth.kernels import decode_attention
from hearth.kernels.paged import Heads, PagedRows

KERNELS = {"before": decode_attention_before, "now": decode_attention, "hint": decode_attention_hint}
#: Kernel, tile and programs per multiprocessor.
WAYS = {
    (32, 32, 128): [
        ("before", (64, 4, 2, None), 4),
        ("now", (32, 4, 3, 128), 4),
        ("hint", (32, 4, 3, 128), 4),
        ("now", (32, 4, 3, None), 4),
        ("now", (64, 4, 2, 128), 4),
    ],
    (32, 8, 128): [
        ("before", (64, 4, 2, None), 4),
        ("now", (32, 4, 3, 128), 4),
        ("hint", (32, 4, 3, 128), 4),
        ("now", (32, 4, 3, None), 4),
        ("now", (64, 4, 2, 128), 4),
    ],
    (64, 8, 128): [("before", (64, 4, 2, None), 4), ("now", (32, 4, 3, 128), 4)],
    (14, 2, 64): [
        ("before", (64, 4, 2, None), 4),
        ("now", (32, 4, 3, 128), 4),
        ("now", (64, 4, 2, 128), 4),
        ("now", (64, 4, 3, 128), 4),
    ],
    (71, 1, 64): [
        ("before", (64, 4, 2, None), 4),
        ("now", (32, 4, 3, None), 4),
        ("now", (64, 4, 2, None), 4),
        ("now", (32, 4, 2, None), 4),
    ],
    (8, 1, 256): [
        ("before", (32, 4, 2, 128), 4),
        ("now", (16, 4, 2, 128), 4),
        ("now", (16, 4, 3, 128), 3),
        ("now", (32, 4, 2, 128), 4),
    ],
    (16, 16, 256): [
        ("before", (32, 4, 2, 128), 4),
        ("now", (16, 4, 2, 128), 4),
        ("now", (16, 4, 3, 128), 3),
        ("now", (32, 4, 2, 128), 4),
    ],
}
HEADS = list(WAYS)


def ragged(count: int) -> list[int]:
    """Contexts as they are in the midst of conversations."""
    random = Random(3)
    return [one.prompt + random.randrange(one.new) for one in conversations()[1000 : 1000 + count]]


LENGTHS = {
    "256 x 161": [161] * 256,
    "208 ragged": ragged(208),
    "64 x 2048": [2048] * 64,
    "1 x 192": [192],
    "1 x 4096": [4096],
    "16 x 512": [512] * 16,
}


def compile_one(kernel: str, shape: str, heads: str) -> None:
    """Compile one variant into the cache, without a device."""
    from hearth.kernels.variants import TargetDriver

    TargetDriver(90).activate()
    module, heads_of = KERNELS[kernel], Heads(*eval(heads))

    def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    rows = PagedRows(
        meta(256, dtype=torch.int32), meta(256, dtype=torch.int32), meta(257, 256, dtype=torch.int32)
    )
    kv = meta(100, 32, 2, 16, heads_of.num_kv, heads_of.dim)[:, 3]
    floats = meta(1 << 20, dtype=torch.float32)
    scratch = module.SplitScratch(528, floats, floats, meta(8192, dtype=torch.int32))
    width = (heads_of.num_q + 2 * heads_of.num_kv) * heads_of.dim
    module.decode_attention_triton(
        meta(256, width), heads_of, rows, kv, window=None, scratch=scratch,
        out=meta(256, heads_of.num_q * heads_of.dim), shape=module.TileShape(*eval(shape)),
    )  # fmt: skip


def compile_all() -> None:
    wanted = [
        [sys.executable, "-m", "bench.engine.attention_trial", kernel, str(shape), str(heads)]
        for heads in HEADS
        for kernel, shape, _ in WAYS[heads]
    ]
    running: list[subprocess.Popen[bytes]] = []
    for command in wanted:
        running.append(subprocess.Popen(command))
        if len(running) >= 14:
            running.pop(0).wait(60)
    for process in running:
        process.wait(60)


def timed(it: Attention, module, shape: tuple, per_processor: int) -> tuple[float, torch.Tensor]:
    scratch = scratch_for(it.heads, it.num_rows, per_processor)

    def launch(layer: int) -> None:
        module.decode_attention_triton(
            it.qkv, it.heads, it.rows, it.kv[:, layer], window=None, scratch=scratch, out=it.out,
            shape=module.TileShape(*shape),
        )  # fmt: skip

    us = microseconds([lambda layer=layer: launch(layer) for layer in range(it.num_layers)])
    launch(0)
    return us, it.out.float()


def main() -> None:
    began_s = time.monotonic()
    compile_all()
    say(part="attention trial", compiled_s=time.monotonic() - began_s)
    for heads in HEADS:
        for name, lengths in LENGTHS.items():
            it, expected, found = Attention(Heads(*heads), lengths), None, {}
            for kernel, shape, per_processor in WAYS[heads]:
                key = f"{kernel} {shape} x{per_processor}"
                try:
                    us, out = timed(it, KERNELS[kernel], shape, per_processor)
                except Exception as error:
                    found[key] = repr(error)[:120]
                    continue
                expected = out if expected is None else expected
                off = float((out - expected).abs().max())
                found[key] = round(us, 1) if off < 0.02 else (round(us, 1), off)
            bound_us = it.num_bytes / 4.4e6
            say(part="attention trial", heads=heads, lengths=name, bound_us=bound_us, **found)
            del it
            torch.cuda.empty_cache()
    say(part="attention trial", seconds=time.monotonic() - began_s)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        compile_one(*sys.argv[1:])
    else:
        main()
