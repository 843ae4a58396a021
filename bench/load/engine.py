"""Loading as a user feels it: the first token of a cold model, and what quantised weights are worth.

Two parts of `bench.load`. Compares with no peer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.load.setting import Part, Setting
from bench.report import Row, percentiles, step
from hearth import LLM, SamplingParams
from hearth.core.config import EngineConfig
from hearth.core.types import Rung
from hearth.store.format.manifest import read_manifest
from hearth.store.tiers.tiers import Tiers

QUANTS = ("int8", "fp8")


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Times of one cold start, counted from the call of LLM; those of the load from its own beginning."""

    returned_s: float
    first_token_s: float
    load_s: float
    first_layer_s: float
    rungs: tuple[str, ...]  #: that delivered chunks


def first_token(setting: Setting) -> Part:
    """Time a cold model whose chunks are in the host tier, in a process that has run such a model before."""
    directory = setting.shelf.model(setting.device)
    bound_s = setting.bound_s(read_manifest(directory).num_bytes)
    with setting.tiers(setting.scale.host_bytes) as tiers:
        with step("first token: compiling kernels, warming the tier"):
            _cold_start(setting, tiers, directory, seed=0)
        with step("first token"):
            runs = [
                _cold_start(setting, tiers, directory, seed=run + 1)
                for run in range(setting.scale.num_engine_runs)
            ]
    assert all(run.rungs == (Rung.HOST,) for run in runs), "the host tier is too small"
    times = percentiles([run.first_token_s for run in runs])
    measure = f"cold first token, host tier, {setting.scale.prompt_tokens}-token prompt, warm process"
    row = Row(measure, "s", times["p50"], bound_s, "at most 1.15 times the bound")
    return Part([row], {"seconds": times, "runs": [asdict(run) for run in runs]})


def _cold_start(setting: Setting, tiers: Tiers, directory: Path, seed: int) -> ColdStart:
    prompt = _prompt(setting, setting.scale.prompt_tokens, seed)
    began_s = time.perf_counter()
    with _opened(setting, tiers, directory) as llm:
        returned_s = time.perf_counter() - began_s
        next(iter(llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))))
        first_token_s = time.perf_counter() - began_s
        record = llm.wait_loaded()
        assert record is not None
        return ColdStart(returned_s, first_token_s, record.total_s, record.first_layer_s, tuple(record.rungs))


def quantised(setting: Setting) -> Part:
    """Measure how much faster half the bytes load and decode."""
    plain = setting.shelf.model(setting.device)
    half_s = setting.bound_s(read_manifest(plain).num_bytes) / 2
    with step("quantised: converting"):
        directories = setting.shelf.quantised(setting.device, QUANTS)
    with step("quantised: decoding bf16"):
        rates = {"bf16": _decode_tokens_per_s(setting, plain)}
    loads, bounds = {}, {}
    for quant, directory in directories.items():
        with step(f"quantised: {quant}"):
            loads[quant] = _host_load_s(setting, directory)
            bounds[quant] = setting.bound_s(read_manifest(directory).num_bytes)
            rates[quant] = _decode_tokens_per_s(setting, directory)
    rows = [
        Row(f"{quant}, host tier to device", "s", loads[quant]["p50"], half_s, "at most 1.1 times the bound")
        for quant in QUANTS
    ]
    aims = {"bf16": None, **dict.fromkeys(QUANTS, "at least 1.5 times bf16")}
    rows += [
        Row(f"{name}, decode at batch 1", "tokens/s", rate["p50"], None, aims[name])
        for name, rate in rates.items()
    ]
    return Part(rows, {"load_s": loads, "bound_of_own_bytes_s": bounds, "tokens_per_s": rates})


def _host_load_s(setting: Setting, directory: Path) -> dict[str, float]:
    with setting.tiers(setting.scale.small_host_bytes) as tiers:
        return percentiles(setting.reload_s(tiers, directory))


def _decode_tokens_per_s(setting: Setting, directory: Path) -> dict[str, float]:
    """Measure one request at a time, prompt included in the time; graphs are warm."""
    num_tokens = setting.scale.decode_tokens
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    rates = []
    with setting.tiers(setting.scale.ring_bytes) as tiers, _opened(setting, tiers, directory) as llm:
        for run in range(setting.scale.num_engine_runs + 2):
            prompt = _prompt(setting, num_tokens, seed=run)
            began_s = time.perf_counter()
            llm.generate([prompt], params)
            if run > 1:  # the first ones warm up
                rates.append(num_tokens / (time.perf_counter() - began_s))
    return percentiles(rates)


@contextmanager
def _opened(setting: Setting, tiers: Tiers, directory: Path) -> Iterator[LLM]:
    config = EngineConfig(kv_bytes=setting.scale.kv_bytes, graphs="lazy")
    with LLM(
        directory, store=tiers, skip_tokenizer_init=True, engine=config, device=setting.device.type
    ) as llm:
        yield llm
    del llm
    gc.collect()
    setting.forget()


def _prompt(setting: Setting, length: int, seed: int) -> list[int]:
    """Return a prompt that never comes twice, so that no prefix is found."""
    vocab_size = setting.scale.config["vocab_size"]
    assert isinstance(vocab_size, int)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return tokens
