"""Ways to compute prompts with adapters, side by side."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from bench.engine.timing import microseconds
from bench.lora.kernels import CUDA, Work, bound_groups
from bench.lora.old.lora_expand import expand_triton as old_expand
from bench.lora.old.lora_shrink import shrink_triton as old_shrink
from hearth.kernels.adapter_rows import AdapterRows
from hearth.kernels.lora_expand import expand_triton
from hearth.kernels.lora_shrink import shrink_triton
from hearth.models.adapter import Projection, target_index

#: Shrinking, expanding, rows of a tile, shares, whether rows weigh, blocks.
NEW = (shrink_triton, expand_triton)
WAYS = {
    "old": (old_shrink, old_expand, 64, 528, False, {"num_splits": 1}),
    "new": (*NEW, 64, 528, True, {}),
    "rows do not weigh": (*NEW, 64, 528, False, {}),
    "64 outputs": (*NEW, 64, 528, True, {"outputs": 64}),
    "64 outputs, 128 registers": (*NEW, 64, 528, True, {"outputs": 64, "max_registers": 128}),
    "2 stages": (*NEW, 64, 528, True, {"num_stages": 2}),
    "2 stages, 168 registers": (*NEW, 64, 528, True, {"num_stages": 2, "max_registers": 168}),
    "8 warps": (*NEW, 64, 528, True, {"num_warps": 8}),
    "128 rows, 8 warps": (*NEW, 128, 528, True, {"num_warps": 8}),
    "128 rows, 64 outputs, 8 warps": (*NEW, 128, 528, True, {"outputs": 64, "num_warps": 8}),
    "8 splits": (*NEW, 64, 528, True, {"num_splits": 8}),
    "16 splits, 32 ranks, 64 inputs": (*NEW, 64, 528, True, {"num_splits": 16, "ranks": 32, "inputs": 64}),
    "1056 shares": (*NEW, 64, 1056, True, {}),
    "264 shares": (*NEW, 64, 264, True, {}),
    "32 rows": (*NEW, 32, 528, True, {}),
}
CASES = [
    ("mixed", [1024] * 2 + [1] * 32),
    ("8", [2048]),
    ("64", [2048]),
    ("mixed", [512] * 8),
    ("16", [1024]),
]


def run(names, cases, *, is_rehearsed):
    for name, lengths in cases:
        table, groups = bound_groups(name, lengths)
        first = {}
        for way in names:
            shrink, expand, tile_rows, shares, weighs, options = WAYS[way]
            try:
                own = groups if weighs else [replace(one, row_weights=(0,) * 4) for one in groups]
                rows = AdapterRows.of(own, tile_rows, CUDA, min_shares=shares)
                found = {"way": way, "case": f"{name} {len(lengths)} {sum(lengths)}"}
                sums = [0.0, 0.0]
                for projection in Projection:
                    work = Work.of(projection, rows)
                    blocks = replace(work.blocks, **options)
                    torch.manual_seed(1)
                    work.x.normal_()
                    work.out.zero_()

                    def one(layer, is_first, work=work, blocks=blocks, projection=projection):
                        target = target_index(layer, projection)
                        if is_first:
                            shrink(work.x, rows, target, blocks, out=work.scratch)
                        else:
                            expand(work.scratch, rows, target, blocks, out=work.out)

                    one(0, True)
                    one(0, False)
                    torch.cuda.synchronize()
                    if is_rehearsed:
                        expected = first.setdefault(projection, work.out.float())
                        off = (work.out.float() - expected).abs().max() / expected.abs().max()
                        found[f"{projection} off"] = round(float(off), 5)
                    times = [
                        microseconds([partial(one, at % 10, which) for at in range(20 if is_rehearsed else 2)])
                        for which in (True, False)
                    ]
                    sums = [a + b for a, b in zip(sums, times, strict=True)]
                    found[str(projection)] = [round(x, 1) for x in times]
                found["sums_us"] = [round(x, 1) for x in sums]
            except Exception as error:
                found = {"way": way, "error": repr(error)[:300]}
            if is_rehearsed:
                print(json.dumps(found), flush=True)
        del table, first


def main() -> None:
    if len(sys.argv) > 1:
        run([sys.argv[1]], [("mixed", [100, 1])], is_rehearsed=False)
        return
    began = time.perf_counter()
    for one in [subprocess.Popen([sys.executable, "-m", "bench.lora.ways", way]) for way in WAYS]:
        one.wait()
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    for case in CASES:
        run(list(WAYS), [case], is_rehearsed=True)
        print(f"{time.perf_counter() - began:.1f} s", flush=True)


main()
