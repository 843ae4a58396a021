"""Kernels are made ready once for a device, and a model runs also where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from hearth.engine.compile import list_key
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.families import arch_from_config
from tests.engine.variant_rig import LIMITS, LLAMA

NEEDS = KernelNeeds.of(arch_from_config(dict(LLAMA)), "bfloat16", "none", LIMITS, 132, 90)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCache]:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        yield KernelCache.open(tmp_path / "kernels")


def test_what_is_loaded_stays_loaded_whatever_becomes_of_the_files(cache: KernelCache) -> None:
    warmup = KernelWarmup(cache)
    assert not warmup.load(NEEDS)
    cache.save(list_key(NEEDS), [])
    assert warmup.load(NEEDS)
    (cache.path / "lists" / f"{list_key(NEEDS)}.json").unlink()
    assert warmup.load(NEEDS)
    assert not KernelWarmup(cache).load(NEEDS)


def test_a_compiler_that_fails_is_told_of_and_stops_no_model(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    warmup = KernelWarmup(cache)
    for _ in range(2):  # tried once
        warmup.compile(NEEDS)
    (record,) = caplog.records
    assert record.getMessage().startswith("fallback kernels=compiled_while_serving ")
    assert "ended with code 1" in record.getMessage()
