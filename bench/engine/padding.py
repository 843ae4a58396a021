"""How many rows does padding add to the steps of real conversations, and what of that costs anything?

    python -m bench.engine.padding LENGTHS.csv.gz

Runs the batcher alone, without a model, over requests that all arrive at once; a CPU does.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.policy.batch.batcher import Batcher, BatchLimits
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import EngineRequest
from hearth.sizes import StepLimits
from hearth.types import RequestId, SamplingParams

NUM_REQUESTS, BLOCK_TOKENS, MAX_CONTEXT = 600, 16, 4096
#: Rows of a tile of a library's product: these are computed anyway.
TILE_ROWS = 128


def lengths(path: Path) -> list[tuple[int, int]]:
    """Tokens of prompts and answers: a random choice, clipped to what a context holds."""
    with gzip.open(path, "rt") as file:
        rows = [(int(prompt), int(output)) for prompt, output in _numbers(file.read())]
    random.Random(11).shuffle(rows)
    return [(min(max(p, 4), 2000), min(max(o, 2), 900)) for p, o in rows[:NUM_REQUESTS]]


def _numbers(text: str) -> list[list[str]]:
    return [row[-2:] for row in csv.reader(text.splitlines()) if row[-1].isdigit()]


def padding(path: Path, limits: StepLimits, num_blocks: int) -> dict[str, object]:
    """Return what padding adds to all steps, as shares of their rows."""
    batcher = Batcher(
        BatchLimits(limits.max_batch_tokens, limits.max_seqs, MAX_CONTEXT),
        BlockBook.fixed(num_blocks, limits.block_tokens),
    )
    for number, (prompt, output) in enumerate(lengths(path)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        batcher.add(EngineRequest(RequestId(str(number)), (number, *range(prompt - 1)), params))
    sizes = PaddedSizes.of(limits)
    steps: Counter[tuple[StepShape, int]] = Counter()
    while (plan := batcher.plan()) is not None:
        steps[sizes.shape_of(plan), plan.num_tokens] += 1
        batcher.commit(plan, [7] * plan.num_samples)
    return {
        "limits": [limits.max_seqs, limits.max_batch_tokens],
        "steps": steps.total(),
        **{name: _share(steps, has_prompts) for name, has_prompts in (("decode", False), ("mixed", True))},
    }


def _share(steps: Counter[tuple[StepShape, int]], has_prompts: bool) -> dict[str, float]:
    chosen: Counter[tuple[int, int]] = Counter()
    for (shape, rows), count in steps.items():
        if shape.has_prompts == has_prompts:
            chosen[shape.num_rows, rows] += count
    total = sum(rows * count for (_, rows), count in chosen.items())
    added = sum((padded - rows) * count for (padded, rows), count in chosen.items())
    tiled = sum(
        max(0, padded - -(-rows // TILE_ROWS) * TILE_ROWS) * count for (padded, rows), count in chosen.items()
    )
    return {
        "steps": chosen.total(),
        "sizes": len({padded for padded, _ in chosen}),
        "mean_share": round(added / max(1, total), 4),
        "beyond_tiles_share": round(tiled / max(1, total), 4),
        "worst_share_beyond_512_rows": round(
            max(((padded - rows) / rows for padded, rows in chosen if rows > 512), default=0.0), 4
        ),
    }


def main() -> None:
    path = Path(sys.argv[1])
    for max_seqs, max_tokens in ((256, 4096), (1024, 8192)):
        limits = StepLimits(max_tokens, max_seqs, BLOCK_TOKENS)
        for num_blocks in (11_000, 44_000):
            print(json.dumps({"blocks": num_blocks, **padding(path, limits, num_blocks)}))


if __name__ == "__main__":
    main()
