"""First steps that are rehearsed for models nobody has asked for yet."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from bench.host_pages import HostPages
from hearth.core.errors import DeviceError
from hearth.core.sizes import StepLimits
from hearth.engine.dry_run import KernelNeeds, dry_runner
from hearth.engine.graphs import CapturedGraph
from hearth.engine.inputs import InputBuffers
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.step_shape import GraphKey, PaddedSizes, StepPart
from hearth.store.format.manifest import read_manifest
from hearth.worker import step_rehearsal
from hearth.worker.step_rehearsal import first_step_keys, other_keys, rehearse
from tests.store.stored import converted

LIMITS = StepLimits(max_batch_tokens=64, max_seqs=4, block_tokens=16)
CPU = torch.device("cpu")


def needs() -> KernelNeeds:
    arch = read_manifest(converted("llama-gqa")).arch
    return KernelNeeds.of(arch, "float32", "none", LIMITS, num_processors=2, capability=90)


def content(pages: HostPages) -> torch.Tensor:
    """Return a copy of the first page."""
    address = pages.reserve(None)
    pages.map(address, 0)
    found = pages.bytes_at(address, pages.page_bytes).clone()
    pages.unmap(address)
    pages.free(address)
    return found


@pytest.mark.parametrize("breaks", [False, True])
def test_a_rehearsal_needs_one_page_and_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("no more kernels")

    learned = list[CapturedGraph]()
    with closing(HostPages(1, 64 << 10)) as pages:
        before = content(pages)
        if breaks:
            monkeypatch.setattr(InputBuffers, "fill", refuse)
            with pytest.raises(DeviceError):
                rehearse(needs(), pages, CPU, lambda: None, learned.append, first_step_keys)
        else:
            rehearse(needs(), pages, CPU, lambda: None, learned.append, first_step_keys)
        assert (pages.mapped, pages.reserved) == ({}, set())
        assert torch.equal(content(pages), before)
        assert not learned, "a CPU captures nothing"


def test_prompts_of_all_sizes_are_rehearsed_with_one_row_of_logits_and_one_that_decodes() -> None:
    runner = dry_runner(needs())
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16, 64), samples=(1, 8))
    assert [key.name for key in first_step_keys(runner)] == ["tail-1", "decode-1", "mixed-16", "mixed-64"]
    assert [key.name for key in other_keys(runner)] == ["decode-8", "tail-8"]
    runner.layers.sizes = PaddedSizes()
    assert first_step_keys(runner) == [], "of what is never captured nothing is rehearsed"
    assert other_keys(runner) == []


@pytest.mark.parametrize("num_keys", [0, 2])
def test_what_tries_restored_graphs_is_rehearsed_behind_the_steps(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    """Where steps are captured: elsewhere no graph is ever tried."""
    done = list[str]()
    monkeypatch.setattr(step_rehearsal, "GraphCapture", lambda: None)
    monkeypatch.setattr(LayerRunner, "rehearse", lambda layers, name, capturer: done.append(name))
    monkeypatch.setattr(step_rehearsal, "rehearse_trial", lambda *_: done.append("trial"))
    keys = [GraphKey(StepPart.DECODE, 1), GraphKey(StepPart.TAIL, 1)][:num_keys]
    with closing(HostPages(1, 64 << 10)) as pages:
        rehearse(needs(), pages, CPU, lambda: done.append("way"), lambda graph: None, lambda runner: keys)
    assert done == (["way", "decode-1", "way", "tail-1", "way", "trial"] if keys else [])
