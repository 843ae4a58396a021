"""Run as a process of its own, where Triton's compiler is on, which the tests' interpreter replaces.

    python -m tests.engine.variant_rig DIRECTORY

Prints as JSON the kernels that are hashed in no fixed order; for several models how many variants a dry run
asks for, those that random traffic asks for besides, keys of launches that stand for more than one, and
operations that a graph would capture with memory of their own; then what came of compiling and loading one
variant in DIRECTORY, of launching it on a device that only takes notes, of a file of it that was cut short,
and of a compiler that crashes.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, RequestId, SamplingParams
from hearth.engine.compile import compile_each, list_key
from hearth.engine.dry_run import KernelNeeds, dry_run, dry_runner
from hearth.kernels import lora_expand
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import CachedVariant, KernelCache
from hearth.kernels.variants import TargetDriver, Variant, recording
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection, projection_shape
from hearth.models.arch import Arch
from hearth.models.families import arch_from_config
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import EngineRequest, StepPlan

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
    report: dict[str, object] = {"hashed_late": hashed_late()}
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
            "allocating": allocating(needs),
        }
    report["cache"] = keep(directory, needs, found["plain"])
    LoadingDriver().activate()
    report["cut_short"] = [
        cut_short(directory, list_key(needs), pattern) for pattern in ("*.cubin", "_act*.json")
    ]
    report["crash"] = crash()
    print(json.dumps(report))


def hashed_late() -> list[str]:
    """Return kernels that another one calls, or that lie beside it, and that are not hashed with it."""
    Variant(lora_expand.__name__, "_expand_kernel", "{}")._function()
    kernels = [one for one in vars(lora_expand).values() if isinstance(one, triton.runtime.JITFunction)]
    return [one.__name__ for one in kernels if one.hash is None]


class NotedAllocations(TorchDispatchMode):
    """Notes the operations whose results lie in memory that none of their arguments has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._kept: list[object] = []  #: or memory of a result that is gone would be that of the next

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        result = operation(*args, **(kwargs or {}))
        known = {one.untyped_storage()._cdata for one in tensors((args, kwargs))}
        if any(one.untyped_storage()._cdata not in known for one in tensors(result)):
            self.names.add(str(operation))
        self._kept.append(result)
        return result


def tensors(values: object) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def allocating(needs: KernelNeeds) -> list[str]:
    """Return the operations of captured parts that would take memory of the graphs."""
    runner = dry_runner(needs)
    run_part, noted = runner.layers.run_part, NotedAllocations()

    def noted_part(*part: Any) -> None:
        with noted:
            run_part(*part)

    runner.layers.run_part = noted_part  # type: ignore[method-assign] # the point of noting
    with recording():
        for has_adapters in (False, True):
            for shape in runner.layers.sizes.all_shapes(has_adapters=has_adapters):
                runner.run_padding(shape)
    return sorted(noted.names)


class LoadingDriver(TargetDriver):
    """A device that loads kernels and runs none."""

    def __init__(self) -> None:
        super().__init__(90)
        properties = {"max_shared_mem": 1 << 20}
        self.utils = SimpleNamespace(
            load_binary=load_binary,
            get_device_properties=lambda _: properties,
            unload_module=lambda _: None,
        )

    def launcher_cls(self, source: object, metadata: object) -> object:
        return lambda *call: None


def load_binary(name: str, binary: bytes, *_: object) -> tuple[object, ...]:
    if not binary:
        raise RuntimeError(f"not a binary: {name}")
    return object(), hash(binary), 0, 0, 1024


def cut_short(directory: Path, key: str, pattern: str) -> dict[str, object]:
    """Load a list whose variant has a file without content, compile it anew, and load it again."""
    cache = KernelCache(directory)
    (listed,) = cache.find(key) or []
    kernel = sys.modules[listed.variant.module].__dict__[listed.variant.kernel]
    for path in (directory / listed.entry).glob(pattern):
        path.write_bytes(b"")
    kernel.device_caches.clear()  # as in a new process
    loaded, found = cache.load(key), cache.find(key)
    num_before = COMPILATIONS.num_while_serving
    cache.save(key, [CachedVariant.of(listed.variant, listed.variant.compiled())])
    num_compiled = COMPILATIONS.num_while_serving - num_before
    return {"loaded": loaded, "found": found, "compiled": num_compiled, "loaded_then": cache.load(key)}


class CrashingVariant(Variant):
    """A variant at which the compiler crashes."""

    def compiled(self) -> object:
        os._exit(9)


def crash() -> str:
    try:
        compile_each([CrashingVariant("hearth.kernels.norm", "_add_norm_kernel", "{}")])
    except BrokenProcessPool:
        return "told"
    return "not told"


def serve(needs: KernelNeeds, seed: int) -> None:
    """Run random traffic over tensors without memory: prompts of all lengths, in chunks, and decodes.

    Half of the requests have an adapter.
    """
    rng, runner = random.Random(seed), dry_runner(needs)
    adapters = [AdapterId(f"rank {rank}") for rank in (1, 8, 17)]
    for adapter, rank in zip(adapters, (1, 8, 17), strict=True):
        layout = whole_adapter(needs, rank)
        pieces = [
            torch.empty(stored.end - stored.begin, dtype=torch.uint8, device="meta")
            for _, stored in layout.layers
        ]
        runner.add_adapter(adapter, layout, pieces)
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
        adapter = rng.choice((None, None, None, *adapters))
        batcher.add(EngineRequest(RequestId(f"r{number}"), prompt, params, adapter=adapter))
        if rng.random() < 0.3:
            advance(batcher, runner.launch, flying, rng)
    while batcher.num_running or batcher.num_waiting or flying:
        advance(batcher, runner.launch, flying, rng)


def whole_adapter(needs: KernelNeeds, rank: int) -> AdapterLayout:
    """Return the layout of an adapter that changes all projections by factors of one rank."""
    targets = []
    for layer in range(needs.arch.num_layers):
        for projection in Projection:
            num_outputs, num_inputs = projection_shape(needs.arch.dimensions, projection)
            targets.append(
                AdapterTarget(layer, projection, num_inputs, (AdapterSlice(0, num_outputs, rank),))
            )
    return AdapterLayout.of(targets, needs.dtype)


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
