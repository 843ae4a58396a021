"""Options of vLLM's `LLM` that are called otherwise here, change nothing, or are refused with advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hearth.core.config import EngineConfig
from hearth.core.errors import ConfigError

ENGINE_FIELDS = {
    "block_size": "block_tokens",
    "gpu_memory_utilization": "memory_fraction",
    "kv_cache_memory_bytes": "kv_bytes",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_seqs",
}
#: Code from a model's files never runs, adapters need no preparation, preempted requests are computed again.
WITHOUT_EFFECT = {
    *("disable_log_stats", "enable_lora", "max_cpu_loras", "max_lora_rank", "max_loras", "swap_space"),
    "trust_remote_code",
}
_STAGES = "`hearth serve` runs a large model in stages on several GPUs"
#: By option: the value that changes nothing, and what to do instead of others.
REFUSED: Mapping[str, tuple[object, str]] = {
    "cpu_offload_gb": (0, _STAGES),
    "data_parallel_size": (1, "`hearth serve` gives a busy model further replicas"),
    "enable_chunked_prefill": (True, "prompts are always read in chunks"),
    "enable_prefix_caching": (True, "prefixes are always cached"),
    "load_format": ("auto", "it is found in the model's files"),
    "pipeline_parallel_size": (1, _STAGES),
    "quantization": (None, "convert the model with `hearth convert --quant`, or deploy it so"),
    "tensor_parallel_size": (1, _STAGES),
    "speculative_config": (None, "there is no speculative decoding"),
    "tokenizer": (None, "put the tokenizer's files into the model's directory"),
    "tokenizer_mode": ("auto", "the tokenizer is that of the model's files"),
}


def engine_config(engine: EngineConfig, options: Mapping[str, object]) -> EngineConfig:
    """Return `engine` with vLLM's options. Raises ConfigError, and TypeError for unknown options."""
    for name, value in options.items():
        if name in ENGINE_FIELDS:
            engine = replace(engine, **{ENGINE_FIELDS[name]: value})  # type: ignore[arg-type] # it checks them
        elif name == "enforce_eager":
            engine = replace(engine, graphs="off") if value else engine
        elif name in REFUSED and value != REFUSED[name][0]:
            raise ConfigError(f"`{name}={value!r}` is not supported: {REFUSED[name][1]}")
        elif name not in WITHOUT_EFFECT | REFUSED.keys():
            raise TypeError(f"LLM() got an unexpected keyword argument '{name}'")
    return engine
