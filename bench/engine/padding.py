"""How many rows does padding add to the steps of real conversations, and how many of them cost anything?

    python -m bench.engine.padding

Runs the batcher alone, without a model, over requests that all arrive at once; a CPU does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from bench.sharegpt import Lengths, conversations
from hearth.core.sizes import StepLimits
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import EngineRequest

NUM_REQUESTS, BLOCK_TOKENS, MAX_CONTEXT = 600, 16, 4096
#: Blocks of KV that an H200 has beside a Llama-2-7B.
NUM_BLOCKS = 11_000
#: Rows of a tile of a library's product: these are computed anyway.
TILE_ROWS = 128


def count_steps(
    limits: StepLimits, requests: Sequence[Lengths], num_blocks: int
) -> Counter[tuple[StepShape, int]]:
    """Return how many steps of each shape and number of tokens it takes to answer requests."""
    sizes = PaddedSizes.of(limits)
    batcher = Batcher(
        BatchLimits(limits.max_batch_tokens, limits.max_seqs, MAX_CONTEXT, sizes.mixed),
        BlockBook.fixed(num_blocks, limits.block_tokens),
    )
    for number, lengths in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=lengths.new, ignore_eos=True)
        batcher.add(EngineRequest(RequestId(str(number)), (number, *range(lengths.prompt - 1)), params))
    steps: Counter[tuple[StepShape, int]] = Counter()
    while (plan := batcher.plan()) is not None:
        steps[sizes.shape_of(plan), plan.num_tokens] += 1
        batcher.commit(plan, [7] * plan.num_samples)
    return steps


def padding(limits: StepLimits) -> dict[str, object]:
    """Return what padding adds to all steps, as shares of their rows."""
    steps = count_steps(limits, conversations()[:NUM_REQUESTS], NUM_BLOCKS)
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
    for max_seqs, max_tokens in ((256, 4096), (1024, 8192)):
        print(json.dumps(padding(StepLimits(max_tokens, max_seqs, BLOCK_TOKENS))))


if __name__ == "__main__":
    main()
