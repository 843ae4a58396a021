"""Run as a process of its own, where Triton's compiler is on, which the tests' interpreter replaces.

    python -m tests.engine.variant_rig DIRECTORY

Prints as JSON, for several models, how many variants a dry run asks for, and those that random traffic asks
for besides; then what came of compiling and loading one variant in DIRECTORY.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hearth.engine.compile import list_key
from hearth.engine.dry_run import KernelNeeds, dry_run, dry_runner
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import CachedVariant, KernelCache
from hearth.kernels.variants import TargetDriver, Variant, recording
from hearth.models.arch import Arch
from hearth.models.families import arch_from_config
from hearth.policy.batch.batcher import Batcher, BatchLimits
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import EngineRequest, StepPlan
from hearth.sizes import StepLimits
from hearth.types import RequestId, SamplingParams

LIMITS = StepLimits(max_batch_tokens=300, max_seqs=20, block_tokens=16)
LLAMA: Mapping[str, object] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256},
    **{"intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512},
    **{"num_key_value_heads": 2, "max_position_embeddings": 640, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    **{"rope_theta": 10000.0, "tie_word_embeddings": True},
}


def models() -> Iterator[tuple[str, Arch, str]]:
    """Yield names, full architectures and kinds of weights."""
    llama = arch_from_config(dict(LLAMA))
    yield "plain", llama, "none"
    # Windows that come and go, biases everywhere, and heads that divide nothing.
    yield (
        "odd",
        replace(
            arch_from_config(
                {**LLAMA, "hidden_size": 200, "num_attention_heads": 5, "num_key_value_heads": 5}
            ),
            windows=(None, 32, 32, None),
            qkv_bias=True,
            o_bias=True,
        ),
        "fp8",
    )


def main(directory: Path) -> None:
    TargetDriver(90).activate()
    report: dict[str, object] = {}
    found: dict[str, set[Variant]] = {}
    for name, arch, quant in models():
        needs = KernelNeeds.of(arch, "bfloat16", quant, LIMITS, 132, 90)
        with recording() as foreseen:
            dry_run(needs)
        with recording() as asked:
            # All layers, and another context: no variant may depend on that.
            serve(replace(needs, arch=replace(arch, max_positions=500)), seed=len(name))
        found[name] = foreseen
        report[name] = {
            "foreseen": len(foreseen),
            "asked": len(asked),
            "unforeseen": sorted(f"{one.kernel} {one.specialization}" for one in asked - foreseen),
        }
    report["cache"] = keep(directory, needs, found["plain"])
    print(json.dumps(report))


def serve(needs: KernelNeeds, seed: int) -> None:
    """Run random traffic over tensors without memory: prompts of all lengths, in chunks, and decodes."""
    rng, runner = random.Random(seed), dry_runner(needs)
    limits = BatchLimits(LIMITS.max_batch_tokens, LIMITS.max_seqs, 500)
    batcher = Batcher(limits, BlockBook.fixed(100, LIMITS.block_tokens))
    flying: list[StepPlan] = []
    for number in range(24):
        prompt = tuple(rng.choices(range(512), k=rng.choice((1, 2, 17, 64, rng.randint(3, 490)))))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.8)),
            top_p=rng.choice((0.9, 1.0)),
            max_tokens=rng.randint(1, 9),
            logprobs=rng.choice((None, 2)),
            presence_penalty=rng.choice((0.0, 0.5)),
            seed=number,
        )
        batcher.add(EngineRequest(RequestId(f"r{number}"), prompt, params))
        if rng.random() < 0.3:
            advance(batcher, runner.launch, flying, rng)
    while batcher.num_running or batcher.num_waiting or flying:
        advance(batcher, runner.launch, flying, rng)


def advance(batcher: Batcher, launch: object, flying: list[StepPlan], rng: random.Random) -> None:
    plan = batcher.plan()
    if plan is not None:
        launch(plan)  # type: ignore[operator] # what it returns is on the meta device, and nobody waits for it
        flying.append(plan)
    if flying and (plan is None or len(flying) > 1):
        landed = flying.pop(0)
        batcher.commit(landed, rng.choices(range(512), k=landed.num_samples))


def keep(directory: Path, needs: KernelNeeds, variants: set[Variant]) -> dict[str, object]:
    """Compile the cheapest variant, list it, and load it as another process would."""
    COMPILATIONS.watch()
    cache, key = KernelCache.open(directory), list_key(needs)
    one = next(variant for variant in variants if variant.kernel == "_activate_kernel")
    cached = CachedVariant.of(one, one.compiled())
    num_compiled = COMPILATIONS.num_while_serving
    cache.save(key, [cached])
    kernel = sys.modules[one.module].__dict__[one.kernel]
    kernel.device_caches.clear()  # as in a new process
    (listed,) = cache.find(key) or []
    loaded = listed.variant.compiled()
    with recording() as asked:
        dry_run(needs)
    return {
        "compiled": num_compiled,
        "compiled_again": COMPILATIONS.num_while_serving - num_compiled,
        "loaded": COMPILATIONS.num_loads_while_serving,
        "asked_though_loaded": one in asked,
        "stays_the_same": listed.variant.compiled() is loaded,
        "num_bytes": sum(path.stat().st_size for path in directory.rglob("*.cubin")),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
