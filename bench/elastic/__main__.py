"""A random Llama-2-7B on a CUDA device: elastic KV beside KV that is reserved. Serves nothing.

    throughput   decode throughput over the batch size: elastic, and all given at the start; the gaps between
                 tokens
    saturation   waves of more requests than KV can hold, also while other models have filled the memory
    shares       how much of the device is left for weights of idle models

Arms take turns. Pages are elsewhere before each run, so that growing has to map them. With `--save` parts
that are not run stay in the result as they were; each says when, on what and at which scale it was measured.
"""

from __future__ import annotations

import gc

import torch

from bench.elastic.contest import Contest
from bench.elastic.load import Prompts
from bench.elastic.pages import CountedPages
from bench.elastic.parts import PARTS, answers, merged
from bench.elastic.setting import Batch, Scale, Surge
from bench.elastic.stage import Arm, Body, Stage, blocks_for
from bench.llama7b import ARCH
from bench.report import HERE, arguments, emit
from hearth.core.config import EngineConfig
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
from hearth.memory.vmm import MappedPool

CONFIG = EngineConfig(graphs="start")
SCALE = Scale(
    batches=(Batch(1, 7), Batch(4, 5), Batch(16, 5), Batch(64, 3), Batch(128, 3), Batch(256, 3)),
    prompt_tokens=128,
    new_tokens=128,
    arms=(Arm.ELASTIC, Arm.FIXED),
    num_fitting=85,
    surges=(Surge(1.0, 2, False), Surge(1.5, 2, False), Surge(3.0, 2, False), Surge(3.0, 1, True)),
    num_surge_rounds=2,
    gaps_batch=64,
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    device = torch.device("cuda")
    seq_blocks = blocks_for(1, SCALE.seq_tokens, CONFIG)
    most = max(batch.num_requests for batch in SCALE.batches)
    body = Body(ARCH, "bfloat16", ARCH.max_positions, CONFIG, device, most * (seq_blocks + 1), PAGE_BYTES)
    pages = CountedPages(CudaPages(device, body.budget_bytes))
    stage = Stage(body, lambda terms_of: MappedPool(pages, terms_of))
    gc.collect()
    gc.freeze()  # else a collection in the midst of a run would look at all that torch has brought along
    contest = Contest(stage, Prompts(ARCH.vocab_size), lambda: pages.maps)
    _, device_bytes = torch.cuda.mem_get_info(device)
    result = answers(contest, SCALE, device_bytes, options.part or PARTS)
    earlier = HERE / "results" / ("elastic.json" if options.save else "nothing")
    emit("elastic", merged(result, earlier), save=options.save)
    stage.close()
    gc.unfreeze()


if __name__ == "__main__":
    main()
