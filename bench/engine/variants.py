"""How many variants of each kernel are compiled for a model? Needs no GPU: a dry run asks for all of them.

python -m bench.engine.variants [--save]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from bench.llama7b import CONFIG as LLAMA_7B
from bench.report import arguments, emit
from hearth.core.config import EngineConfig
from hearth.engine.dry_run import KernelNeeds, dry_run
from hearth.kernels.variants import TargetDriver, recording
from hearth.models.families import arch_from_config
from hearth.policy.batch.step_limits import step_limits

LLAMA_8B = {
    **LLAMA_7B,
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0},
    "max_position_embeddings": 8192,
}
QWEN_HALF = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896},
    **{"intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "vocab_size": 151936},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
    **{"hidden_act": "silu", "rope_theta": 1000000.0, "tie_word_embeddings": True},
}
MISTRAL = {
    **LLAMA_8B,
    **{"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
    **{"vocab_size": 32000, "max_position_embeddings": 32768},
}
#: Models and how their weights are quantised.
MODELS: Mapping[str, tuple[Mapping[str, object], str]] = {
    "Llama-2-7B": (LLAMA_7B, "none"),
    "Llama-3-8B": (LLAMA_8B, "none"),
    "Mistral-7B": (MISTRAL, "none"),
    "Qwen2.5-0.5B": (QWEN_HALF, "none"),
    "Qwen2.5-0.5B int8": (QWEN_HALF, "int8"),
}
NUM_PROCESSORS, CAPABILITY, MEMORY_BYTES = 132, 90, 125 << 30  # an H200


def count(config: Mapping[str, object], quant: str) -> Counter[str]:
    """Return how many variants of each kernel a model needs."""
    arch = arch_from_config(dict(config))
    limits = step_limits(EngineConfig().wanted_limits, arch.dimensions, "bfloat16", "cuda", MEMORY_BYTES)
    with recording() as variants:
        dry_run(KernelNeeds.of(arch, "bfloat16", quant, limits, NUM_PROCESSORS, CAPABILITY))
    return Counter(sorted(variant.kernel.strip("_").removesuffix("_kernel") for variant in variants))


def lines(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Return a table of kernels by models, as people read it."""
    kernels = sorted({kernel for of_model in counts.values() for kernel in of_model})
    width = max(map(len, kernels))
    body = [
        f"{kernel:{width}}"
        + "".join(f"  {of_model[kernel]:>{len(model)}}" for model, of_model in counts.items())
        for kernel in kernels
    ]
    sums = "".join(f"  {of_model.total():>{len(model)}}" for model, of_model in counts.items())
    return [
        f"{'kernel':{width}}" + "".join(f"  {model}" for model in counts),
        *body,
        f"{'all':{width}}{sums}",
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    TargetDriver(CAPABILITY).activate()
    counts = {name: count(*model) for name, model in MODELS.items()}
    emit("kernel_variants", {"table": lines(counts), "counts": counts}, save=options.save)


if __name__ == "__main__":
    main()
