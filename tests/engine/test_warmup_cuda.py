"""Kernels on a CUDA device are ready before the first step: nothing is compiled or loaded behind it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from hearth.core.types import SamplingParams
from hearth.engine.assemble import own_limits
from hearth.engine.compile import CompileTask
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import triton
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.families import read_arch
from tests.engine.harness import ROOMY, engine_for, new_id, run
from tests.models.zoo import build

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

#: Grouped heads behind windows; single ones, biases and a projected embedding.
FAMILIES = ["mistral-window", "opt-350m"]


@pytest.fixture
def _tritons_own_cache() -> Iterator[None]:
    """Leave Triton's settings as they were."""
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        yield


@pytest.mark.usefixtures("_tritons_own_cache")
@pytest.mark.parametrize("name", FAMILIES)
def test_random_traffic_finds_every_kernel_ready(name: str, tmp_path: Path) -> None:
    arch = read_arch(build(name).directory)
    COMPILATIONS.watch()
    warmup = KernelWarmup(KernelCache.open(tmp_path / "kernels"))
    limits = own_limits(ROOMY, arch, torch.bfloat16, torch.device("cuda"))
    needs = KernelNeeds.on(torch.device("cuda"), arch, "bfloat16", "none", limits)
    assert not warmup.load(needs), "an empty cache has nothing to load"
    warmup.compile(needs)
    assert warmup.load(needs)
    before = COMPILATIONS.num_while_serving, COMPILATIONS.num_loads_while_serving

    engine = engine_for(name, device="cuda", dtype="bfloat16")
    rng = random.Random(5)
    for _ in range(4):
        requests = [
            engine.request(
                new_id(),
                rng.choices(range(arch.vocab_size), k=rng.randint(1, 100)),
                SamplingParams(
                    temperature=rng.choice((0.0, 0.9)), max_tokens=rng.randint(1, 9), ignore_eos=True
                ),
            )
            for _ in range(rng.choice((1, 2, 5, 12)))
        ]
        run(engine, requests)

    assert (COMPILATIONS.num_while_serving, COMPILATIONS.num_loads_while_serving) == before


@pytest.mark.usefixtures("_tritons_own_cache")
def test_nothing_is_left_to_be_built_when_kernels_are_loaded(tmp_path: Path) -> None:
    """Triton 3.6 has C code for each kernel's launches, which takes longer to compile than to load."""
    arch, cuda = read_arch(build("llama-gqa").directory), torch.device("cuda")
    cache = KernelCache.open(tmp_path / "kernels")
    needs = KernelNeeds.on(cuda, arch, "bfloat16", "none", own_limits(ROOMY, arch, torch.bfloat16, cuda))
    command = [sys.executable, "-m", "hearth.engine.compile"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(CompileTask(str(cache.path), needs)) + b"\n")
        assert process.wait() == 0
    built = set(cache.path.rglob("*"))
    assert KernelWarmup(cache).load(needs)
    assert set(cache.path.rglob("*")) == built


@pytest.mark.usefixtures("_tritons_own_cache")
def test_a_kernel_that_a_step_has_to_compile_is_counted(tmp_path: Path) -> None:
    KernelCache.open(tmp_path / "kernels")
    COMPILATIONS.watch()
    before = COMPILATIONS.num_while_serving
    # A block size that no other test has, so that no kernel of it was compiled before.
    engine = engine_for("llama-gqa", replace(ROOMY, block_tokens=32), device="cuda", dtype="bfloat16")
    run(engine, [engine.request(new_id(), [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))])
    assert COMPILATIONS.num_while_serving > before
