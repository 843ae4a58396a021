"""vLLM's options of `LLM`: which setting they become, and what is said where there is none."""

from __future__ import annotations

import pytest

from hearth.core.config import EngineConfig
from hearth.core.errors import ConfigError
from hearth.vllm_options import ENGINE_FIELDS, REFUSED, WITHOUT_EFFECT, engine_config


def test_options_become_settings_of_the_engine() -> None:
    given = {
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 99,
        "block_size": 8,
        "kv_cache_memory_bytes": 1 << 20,
    }
    assert given.keys() == ENGINE_FIELDS.keys()
    found = engine_config(EngineConfig(max_step=0.2), {**given, "enforce_eager": True})

    assert found == EngineConfig(
        max_step=0.2,
        memory_fraction=0.5,
        max_seqs=7,
        max_batch_tokens=99,
        block_tokens=8,
        kv_bytes=1 << 20,
        graphs="off",
    )


def test_what_changes_nothing_is_taken() -> None:
    harmless = {name: value for name, (value, _) in REFUSED.items()} | dict.fromkeys(WITHOUT_EFFECT, True)

    assert engine_config(EngineConfig(), harmless | {"enforce_eager": False}) == EngineConfig()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_what_to_do_instead(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_config(EngineConfig(), {name: "other"})

    assert str(refusal.value) == f"`{name}='other'` is not supported: {REFUSED[name][1]}"


def test_wrong_values_and_unknown_options_are_errors() -> None:
    with pytest.raises(ConfigError, match="memory_fraction"):
        engine_config(EngineConfig(), {"gpu_memory_utilization": 3.0})
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpu_memory'"):
        engine_config(EngineConfig(), {"gpu_memory": 0.5})
