"""The memory of stages by facts alone, compared with what a worker places for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.control.deploy.deployer import facts_of
from hearth.core.messages import HostModel
from hearth.core.sizes import StepLimits
from hearth.core.types import Member, ModelId, Pipeline, WorkerId
from hearth.memory.mapped_tenant import pages_of
from hearth.models.families import read_arch
from hearth.policy.fleet.footprint import (
    PAGE_BYTES,
    Facts,
    footprint,
    split_evenly,
    stage_sizes,
    staged_context,
)
from hearth.policy.fleet.profile import Footprint, PartBytes, StageSizes
from hearth.store.format.manifest import Manifest
from hearth.text.tokenizer import Tokenizer
from hearth.worker.hosting_spec import hosting_spec
from tests.models.zoo import VARIANTS, build
from tests.policy.fleet.test_footprint import LARGE

LIMITS = StepLimits(max_batch_tokens=64, max_seqs=4, block_tokens=16)
PARTS = PartBytes(layer_bytes=400 << 20, first_bytes=300 << 20, last_bytes=300 << 20)
#: The same model as `LARGE`, deployed with the bytes of its parts.
SPLIT = replace(LARGE, parts=PARTS, wide_parts=PARTS)
#: A stage of n layers takes 10 bytes for each, 5 for the embedding, 20 for the head, and n for each block.
SIZES = StageSizes(
    num_layers=12,
    stored=PartBytes(10, 5, 20),
    placed=PartBytes(10, 5, 20),
    spare_bytes=0,
    unit_bytes=1,
    kv_layer_bytes=1,
    kv_unit_bytes=1,
    num_lost_blocks=0,
    workspace_bytes=0,
    tables_bytes=0,
    context_blocks=1,
    max_seqs=4,
)


def order(begin: int, end: int, num_layers: int, kv_bytes: int, num_blocks: int) -> HostModel:
    """An order for one member of a pipeline whose other members have the other layers."""
    ends = sorted({0, begin, end, num_layers})
    members = tuple(Member(WorkerId(f"w{a}"), a, b) for a, b in pairwise(ends))
    return HostModel(
        model=ModelId("m"),
        hosting=1,
        where="",
        digest="",
        weight=1.0,
        max_context=64,
        limits=LIMITS,
        kv_floor_bytes=kv_bytes,
        max_kv_bytes=kv_bytes,
        eos_ids=(),
        pipeline=Pipeline("m-1", members, num_blocks),
        member=[one.begin for one in members].index(begin),
    )


@pytest.mark.parametrize(
    ("dtype", "quant"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")]
)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_promise_suffices_for_what_a_worker_places(
    name: str, dtype: str, quant: str, tokenizer: Tokenizer
) -> None:
    manifest = Manifest.of(read_arch(build(name).directory), dtype, quant, (), 4096, {})
    facts, num_layers = facts_of(manifest, tokenizer), manifest.arch.num_layers
    sizes = stage_sizes(facts, "cpu", LIMITS, context=64)
    assert sizes is not None
    for begin, end in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3)):
        roles = {"is_first": begin == 0, "is_last": end == num_layers}
        taken = sizes.footprint(end - begin, **roles)

        placed = hosting_spec(
            order(begin, end, num_layers, taken.min_kv_bytes, sizes.context_blocks),
            manifest,
            None,
            torch.device("cpu"),
        )

        shape = placed.shape
        assert placed.floor_blocks == sizes.context_blocks
        assert sizes.stored.of(end - begin, **roles) == shape.stored.own_bytes
        widening_bytes = 0 if dtype == "float32" else max(spec.nbytes for spec in shape.stored.tensors)
        assert taken.weights_bytes >= shape.served.own_bytes + widening_bytes + 8 * shape.block_bytes
        assert taken.workspace_bytes >= shape.workspace_bytes
        assert taken.tables_bytes >= shape.tables_bytes
        assert taken.promise.standing_bytes == taken.promise.own_bytes


@pytest.mark.parametrize("page_bytes", [4096, 5 * 4096, 1 << 20])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied", "opt-350m"])
def test_few_pages_are_shared_with_layers_of_other_stages(
    name: str, page_bytes: int, tokenizer: Tokenizer
) -> None:
    manifest = Manifest.of(read_arch(build(name).directory), "bfloat16", "none", (), 4096, {})
    sizes = stage_sizes(facts_of(manifest, tokenizer), "cuda", LIMITS, context=64)
    assert sizes is not None
    assert sizes.spare_bytes == 3 * PAGE_BYTES
    for begin in range(3):
        for end in range(begin + 1, 4):
            if end - begin < 3:
                part = manifest.layout.only(manifest.arch, range(begin, end))
                least = -(-part.own_bytes // page_bytes)
                assert len(pages_of(part, page_bytes)) <= least + 3


def test_a_model_that_was_deployed_before_has_no_stages() -> None:
    assert stage_sizes(LARGE, "cuda", LIMITS, 2048) is None


def holding(num_bytes: int) -> list[int] | None:
    """The layers of two stages of `SIZES`, the first on a worker of so many bytes."""
    return SIZES.split([lambda stage: stage.least_bytes <= num_bytes, lambda stage: True])


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    assert holding(1000) == [7, 5]


def test_a_worker_gets_no_more_layers_than_it_can_hold() -> None:
    assert holding(5 + 3 * 12) == [3, 9]
    assert holding(5 + 11) is None


def test_the_fewest_stages_are_taken() -> None:
    assert split_evenly(SIZES, 100) == [7, 5]
    assert split_evenly(SIZES, 70) == [5, 5, 2]
    assert split_evenly(SIZES, 10) is None


@given(st.lists(st.integers(0, 150), min_size=2, max_size=8), st.none() | st.integers(0, 20))
def test_layers_are_all_given_out_and_no_split_has_a_smaller_largest_stage(
    budgets: list[int], head_layers: int | None
) -> None:
    def fits(budget_bytes: int, stage: Footprint) -> bool:
        return stage.least_bytes <= budget_bytes

    able = [lambda stage, most=most: fits(most, stage) for most in budgets]  # type: ignore[misc]
    shares, head = SIZES.split(able, head_layers), 2 if head_layers is None else head_layers
    last = len(budgets) - 1
    most = [
        SIZES.most_layers(lambda stage, b=b: fits(b, stage), is_first=at == 0, is_last=at == last)  # type: ignore[misc]
        for at, b in enumerate(budgets)
    ]
    if shares is None:
        assert not all(most) or sum(most) < 12
        return
    assert sum(shares) == 12
    assert all(1 <= share <= limit for share, limit in zip(shares, most, strict=True))
    below = max(share + head * (at == last) for at, share in enumerate(shares)) - 1
    held = [min(m, below - head * (at == last)) for at, m in enumerate(most)]
    assert sum(held) < 12 or min(held) < 1, "less would do"


def test_the_context_is_cut_to_what_the_fewest_stages_hold() -> None:
    budget_bytes = 9 << 30
    context = staged_context(SPLIT, "cuda", LIMITS, budget_bytes)
    assert context == 8192
    small = replace(LIMITS, max_seqs=1)
    for budget_bytes in (7 << 30, (7 << 30) + (512 << 20)):
        context = staged_context(SPLIT, "cuda", small, budget_bytes)
        assert context is not None
        sizes = stage_sizes(SPLIT, "cuda", small, context)
        assert sizes is not None
        assert split_evenly(sizes, budget_bytes) is not None
    assert staged_context(SPLIT, "cuda", LIMITS, 1 << 30) is None
    assert footprint(SPLIT, "cuda", LIMITS).least_bytes > 9 << 30


def test_facts_of_the_whole_model_are_those_of_its_parts(tokenizer: Tokenizer) -> None:
    for name in VARIANTS:
        manifest = Manifest.of(read_arch(build(name).directory), "bfloat16", "none", (), 4096, {})
        facts: Facts = facts_of(manifest, tokenizer)
        assert facts.parts is not None
        tied = next(spec for spec in manifest.tensors if spec.name == "embed.weight")
        twice = (tied.end - tied.offset) if manifest.arch.tied_head else 0
        assert facts.parts.of(3, is_first=True, is_last=True) == facts.num_bytes + twice
