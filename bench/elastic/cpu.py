"""A random model of SmolLM2-135M's shape in float32 on this CPU: what `bench.elastic` asks, on the arena."""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import gc
from collections.abc import Mapping

import torch

from bench.elastic.contest import Contest
from bench.elastic.load import Prompts
from bench.elastic.pages import Maps
from bench.elastic.parts import answers
from bench.elastic.setting import Batch, Scale, Surge
from bench.elastic.stage import Arm, Body, Stage, blocks_for
from bench.report import arguments, emit
from hearth.core.config import EngineConfig
from hearth.memory.arena import ArenaPool
from hearth.models.families import arch_from_config
from hearth.system.host_memory import machine_bytes

NUM_THREADS = 2
#: Promised to it: less than it was made for, so that little memory saturates.
MAX_CONTEXT = 256
#: Weights of others come and go by so much.
UNIT_BYTES = 1 << 20
SHAPE: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SCALE = Scale(
    batches=(Batch(1, 5), Batch(4, 3), Batch(16, 3)),
    prompt_tokens=32,
    new_tokens=48,
    arms=(Arm.ELASTIC, Arm.FIXED, Arm.PLAIN),
    num_fitting=5,
    surges=(Surge(3.0, 2, False), Surge(3.0, 2, True)),
    num_surge_rounds=1,
    gaps_batch=16,
)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(NUM_THREADS)
    config = EngineConfig(max_batch_tokens=512, max_seqs=16)
    most = max(batch.num_requests for batch in SCALE.batches)
    kv_blocks = most * (blocks_for(1, SCALE.seq_tokens, config) + 1)
    arch, device = arch_from_config(dict(SHAPE)), torch.device("cpu")
    body = Body(arch, "float32", MAX_CONTEXT, config, device, kv_blocks, UNIT_BYTES)
    stage = Stage(body, lambda terms_of: ArenaPool(device, body.budget_bytes, terms_of))
    # Nothing is mapped here, so nothing is counted. A worker has half of the machine's memory by default.
    gc.collect()
    gc.freeze()  # else a collection in the midst of a run would look at all that torch has brought along
    contest = Contest(stage, Prompts(arch.vocab_size), Maps)
    emit("elastic_cpu", answers(contest, SCALE, machine_bytes() // 2), save=options.save)
    stage.close()
    gc.unfreeze()


if __name__ == "__main__":
    main()
