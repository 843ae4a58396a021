"""The arena with real bytes: whatever is placed, moved, taken and grown, what is there stays as it was."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import DeviceError
from hearth.core.types import Digest, Hold, ModelId
from hearth.memory.arena import ArenaPool
from hearth.memory.arena_tenant import BATCH_BLOCKS
from hearth.memory.placement import Packer
from hearth.memory.pool import EvictionTerms, Pool, Shape, Space
from hearth.memory.regions import aligned
from hearth.models.dtypes import STORED_DTYPES
from hearth.models.layout import ALIGNMENT_BYTES, Layout, TensorSpec
from hearth.models.weights import TensorPlace
from hearth.policy.fleet.footprint import MAX_EXTENTS
from hearth.policy.fleet.profile import Promise
from hearth.policy.memory.packing import Item, Packing, Region, merge_all, pack
from tests.memory.resident_pages import PAGE_BYTES, resident_pages

PAGE = ALIGNMENT_BYTES
CPU = torch.device("cpu")
A, B, C = (ModelId(name) for name in "abc")
MODELS = tuple(ModelId(name) for name in "abcdef")


def layout(num_elements: Sequence[int], dtype: str) -> Layout:
    sizes = [aligned(num * STORED_DTYPES[dtype].itemsize) for num in num_elements]
    begins = list(accumulate(sizes, initial=0))
    specs = [
        TensorSpec(f"t{i}", dtype, (num,), begin)
        for i, (num, begin) in enumerate(zip(num_elements, begins, strict=False))
    ]
    return Layout(tuple(specs), begins[-1])


def shape(
    pages: Sequence[float],
    *,
    digest: str = "00",
    workspace_bytes: int = PAGE,
    tables_bytes: int = 0,
    block_bytes: int = PAGE,
    max_blocks: int = 1000,
    stored: str = "float32",
) -> Shape:
    """A model with a tensor of so many pages each."""
    num_elements = [int(num * PAGE / 4) for num in pages]
    layouts = layout(num_elements, stored), layout(num_elements, "float32")
    return Shape(
        Digest(digest), *layouts, 1 << 24, (), workspace_bytes, tables_bytes, block_bytes, max_blocks
    )


def wipe(part: torch.Tensor) -> None:
    part.fill_(0xFF)


class World:
    """A pool, its caller, and what the caller knows to be in memory.

    Freed memory is filled with 0xFF, or, unless it `is_wiped`, must have gone back to the system.
    """

    def __init__(
        self, num_pages: int, packer: Packer = pack, *, budget_bytes: int = 0, is_wiped: bool = True
    ) -> None:
        self.is_wiped = is_wiped
        self.holds: dict[ModelId, Hold] = {}
        self.costs: dict[ModelId, float] = {}
        self.loading: set[ModelId] = set()
        self.spaces: dict[ModelId, Space] = {}
        self.shapes: dict[ModelId, Shape] = {}
        self.places: dict[ModelId, dict[str, TensorPlace]] = {}
        self.blocks: dict[ModelId, list[range]] = {}
        self.arena = ArenaPool(
            CPU,
            budget_bytes or num_pages * PAGE,
            self.eviction_terms,
            packer=packer,
            wipe=wipe if is_wiped else None,
        )
        self.pool: Pool = self.arena

    def eviction_terms(self, model: ModelId) -> EvictionTerms:
        hold, cost = self.holds.get(model, Hold.RETAINED), self.costs.get(model, 1.0)
        return EvictionTerms(hold, cost, is_loading=model in self.loading)

    def take(self, num_bytes: int, most: Hold) -> int:
        freed_bytes = self.pool.take_weights(num_bytes, most)
        if freed_bytes < num_bytes:
            freed_bytes += self.pool.take_workspaces(most)
        return freed_bytes

    def place(self, model: ModelId, wanted: Shape) -> Space:
        space = self.pool.place(model, wanted)
        missing = {gap.part.begin for gap in space.gaps}
        self.loading.add(model)
        self.shapes[model], self.places[model] = wanted, dict(space.places)
        for spec in wanted.stored.tensors:
            if spec.offset in missing:
                self.tensor(model, spec).copy_(
                    content(model, spec.offset + 7 * len(wanted.digest), spec.nbytes)
                )
        is_new = model not in self.spaces
        self.spaces[model] = space
        if is_new:
            self.blocks[model] = []
            self.give(model, range(space.sink, space.sink + 1))
        return space

    def load(self, model: ModelId, wanted: Shape) -> Space:
        space = self.place(model, wanted)
        self.load_ended(model, is_whole=True)
        return space

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        self.loading.discard(model)
        self.pool.load_ended(model, is_whole=is_whole)

    def retire(self, model: ModelId) -> None:
        self.forget(model)
        self.pool.retire(model)

    def drop(self, model: ModelId) -> None:
        self.forget(model)
        self.pool.drop(model)

    def forget(self, model: ModelId) -> None:
        for known in (self.spaces, self.places, self.blocks):
            known.pop(model, None)

    def grow(self, model: ModelId, num_blocks: int) -> list[range]:
        grown = self.pool.kv.grow(model, num_blocks)
        for extent in grown:
            self.give(model, extent)
        return grown

    def give(self, model: ModelId, extent: range) -> None:
        self.blocks[model].append(extent)
        for block in extent:
            self.block(model, block).copy_(content(model, block, self.shapes[model].block_bytes))

    def shrink(self, model: ModelId, extent: range) -> None:
        self.blocks[model].remove(extent)
        self.pool.kv.shrink(model, extent)

    def tensor(self, model: ModelId, spec: TensorSpec) -> torch.Tensor:
        place = self.places[model][spec.name]
        return place.base[place.offset : place.offset + spec.nbytes]

    def block(self, model: ModelId, block: int) -> torch.Tensor:
        num_bytes = self.shapes[model].block_bytes
        return self.spaces[model].kv[block * num_bytes : (block + 1) * num_bytes]

    def check(self) -> None:
        """What is placed can be computed with: its tensors and blocks hold what was written there."""
        self.arena.check()
        usage = self.pool.usage()
        there = {one.model: one for one in usage.holdings}
        assert usage.budget_bytes == usage.free_bytes + usage.workspace_bytes + usage.lost_bytes + sum(
            one.weights_bytes + one.kv_bytes + one.tables_bytes for one in usage.holdings
        )
        for model, places in self.pool.take_moved().items():
            self.places[model] = dict(places)
        for model, space in self.spaces.items():
            if not self.pool.is_incomplete(model):
                space.workspace.fill_(0xAA)  # nobody else minds
            for block in (block for extent in self.blocks[model] for block in extent):
                expected = content(model, block, self.shapes[model].block_bytes)
                assert torch.equal(self.block(model, block), expected), f"{block=} of `{model}`"
        for model in self.spaces:
            if there[model].weights_bytes == there[model].total_bytes:
                self.check_tensors(model)
        if not self.is_wiped:
            self.check_pages()

    def check_pages(self) -> None:
        """The system has every page that nobody has a part of, unless it was taken for somebody just now."""
        if self.arena._books.freed:
            return
        resident = resident_pages(self.arena._books.memory)
        for free in self.arena._books.regions.free_spans():
            begin = -(-free.begin // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = range(begin, free.end // mmap.PAGESIZE * mmap.PAGESIZE, PAGE_BYTES)
            held = [at for at in whole if resident[at // PAGE_BYTES]]
            assert not held, f"pages at {held} of {free} are nobody's and still in memory"

    def check_tensors(self, model: ModelId) -> None:
        wanted = self.shapes[model]
        for spec in wanted.stored.tensors:
            expected = content(model, spec.offset + 7 * len(wanted.digest), spec.nbytes)
            assert torch.equal(self.tensor(model, spec), expected), f"{spec} of `{model}`"


@cache
def content(model: ModelId, number: int, num_bytes: int) -> torch.Tensor:
    """Bytes that only this part of this model has; never 0xFF."""
    seed = ord(model) * 31 + number * 17
    return ((torch.arange(num_bytes) * 13 + seed + number // 251) % 251).to(torch.uint8)


SHAPES = st.builds(
    shape,
    st.lists(st.sampled_from([0.25, 1, 1.5, 2, 3, 5]), min_size=1, max_size=3),
    digest=st.sampled_from(["0", "00"]),
    workspace_bytes=st.sampled_from([0, 0, 100, PAGE + 1]),
    block_bytes=st.sampled_from([1000, PAGE, 6000, 2 * PAGE]),
    max_blocks=st.integers(1, 20),
)
#: Some more often than others, so that there is something to disturb.
KINDS = [
    kind
    for kind, times in {
        "place": 1,
        "host": 8,
        "make room": 1,
        "landed": 2,
        "lost": 1,
        "take": 1,
        "grow": 2,
        "shrink": 1,
        "retire": 2,
        "drop": 2,
        "hold": 1,
    }.items()
    for _ in range(times)
]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(MODELS), st.integers(0, 12)), min_size=30, max_size=50
)


def step(world: World, shapes: dict[ModelId, Shape], what: str, model: ModelId, number: int) -> None:
    is_placed, is_loading = model in world.spaces, model in world.loading
    if what == "place" and not is_loading:
        place_or_be_refused(world, model, shapes[model])
    elif what in ("make room", "host") and not is_loading:
        make_room(world, model, shapes[model])
        place_or_be_refused(world, model, shapes[model])
        if what == "host" and model in world.loading:
            world.load_ended(model, is_whole=True)
    elif what in ("landed", "lost") and is_loading:
        world.load_ended(model, is_whole=what == "landed")
    elif what == "take":
        take(world, number * PAGE, Hold(number % len(Hold)))
    elif what == "grow" and is_placed:
        before_bytes = world.pool.usage().free_bytes
        grown = world.grow(model, number)
        assert all(extent for extent in grown)
        assert sum(map(len, grown)) <= number + BATCH_BLOCKS
        assert before_bytes >= sum(map(len, grown)) * shapes[model].block_bytes
    elif what == "shrink" and is_placed:
        extents = world.pool.kv.extents(model)
        assert sorted(extents, key=lambda one: one.start) == sorted(
            world.blocks[model][1:], key=lambda one: one.start
        )
        if extents:
            world.shrink(model, extents[number % len(extents)])
    elif what == "retire" and is_placed and not is_loading:
        world.retire(model)
    elif what == "drop" and not is_loading:
        world.drop(model)
    elif what == "hold":
        world.holds[model], world.costs[model] = Hold(number % len(Hold)), float(number)


def make_room(world: World, model: ModelId, wanted: Shape) -> None:
    hold = world.holds.get(model, Hold.RETAINED)
    world.holds[model] = Hold.BUSY  # what it has already is not taken from it
    freed_bytes = 1
    while freed_bytes and (lacking_bytes := world.pool.missing_bytes(model, wanted)):
        freed_bytes = world.take(lacking_bytes, Hold.PAUSED)
    world.holds[model] = hold


def place_or_be_refused(world: World, model: ModelId, wanted: Shape) -> None:
    lacking_bytes = world.pool.missing_bytes(model, wanted)
    before = world.pool.usage()
    if lacking_bytes > 0:
        with pytest.raises(DeviceError, match=f"`{model}` needs"):
            world.pool.place(model, wanted)
        assert world.pool.usage() == before
        return
    world.place(model, wanted)
    world.check_tensors(model)  # what was not missing is still there
    assert world.pool.missing_bytes(model, wanted) == 0


def take(world: World, num_bytes: int, most: Hold) -> None:
    before = world.pool.usage()
    freed_bytes = world.take(num_bytes, most)
    after = world.pool.usage()
    assert after.free_bytes == before.free_bytes + freed_bytes
    there = {one.model: one.weights_bytes for one in after.holdings}
    for one in before.holdings:
        terms = world.eviction_terms(one.model)
        left_bytes = there.get(one.model, 0)
        may_take = terms.hold <= min(most, Hold.PAUSED) and not terms.is_loading
        assert may_take or left_bytes == one.weights_bytes, f"taken from {one.model}: {terms}"
        assert freed_bytes >= num_bytes or not may_take or left_bytes == 0, f"left with {one.model}"


@given(
    st.lists(SHAPES, min_size=len(MODELS), max_size=len(MODELS)),
    STEPS,
    st.integers(16, 24),
    st.sampled_from([pack, merge_all]),
    st.booleans(),
)
def test_what_is_there_stays_as_it_was_whatever_happens(
    shapes: list[Shape],
    steps: list[tuple[str, ModelId, int]],
    num_pages: int,
    packer: Packer,
    is_wiped: bool,
) -> None:
    world = World(num_pages, packer, is_wiped=is_wiped)
    for what, model, number in steps:
        step(world, dict(zip(MODELS, shapes, strict=True)), what, model, number)
        world.check()
    for model in MODELS:
        world.drop(model)
    assert world.pool.usage().free_bytes == num_pages * PAGE
    assert is_wiped or not any(resident_pages(world.arena._books.memory))


@pytest.mark.parametrize("page_bytes", [PAGE_BYTES, 4 * PAGE_BYTES])
def test_the_system_gets_back_what_models_had_and_nothing_that_they_have(
    page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a page of the system is larger than the regions of several tensors."""
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    world = World(256, is_wiped=False)
    steps: list[Callable[[], object]] = [
        lambda: world.load(A, shape([7, 5, 30], workspace_bytes=9 * PAGE)),
        lambda: world.load(B, shape([3, 2, 40], digest="0")),
        lambda: world.grow(A, 40),
        lambda: world.shrink(A, world.pool.kv.extents(A)[0]),
        lambda: world.retire(A),
        lambda: world.pool.take_weights(30 * PAGE, Hold.RETAINED),
        lambda: world.load(C, shape([180, 5], digest="000")),  # tensors move for it
        lambda: world.pool.take_weights(20 * PAGE, Hold.RETAINED),
        lambda: world.grow(C, 2),  # which is less than was taken for it
        lambda: world.drop(B),
        lambda: world.drop(C),
        lambda: world.drop(A),
    ]
    for step_of in steps:
        step_of()
        world.check()
    assert not world.arena._books.freed
    assert world.pool.usage().moved_bytes
    assert not any(resident_pages(world.arena._books.memory))


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=10), st.integers(1, 9))
def test_what_fits_in_sum_is_placed_where_nothing_is_in_the_way_that_cannot_move(
    others: list[tuple[int, bool]], spare_pages: int
) -> None:
    world = World(sum(pages for pages, _ in others) + spare_pages + 1)
    models = [ModelId(chr(ord("d") + index)) for index in range(len(others))]
    shapes = [shape([pages], workspace_bytes=0) for pages, _ in others]
    for model, one in zip(models, shapes, strict=True):
        world.load(model, one)
        world.retire(model)
    kept = [pair for pair, (_, stays) in zip(zip(models, shapes, strict=True), others, strict=True) if stays]
    for model in set(models) - {model for model, _ in kept}:
        world.drop(model)
    free_pages = world.pool.usage().free_bytes // PAGE
    world.load(A, shape([free_pages - 1], workspace_bytes=0))

    world.check()
    assert world.pool.usage().free_bytes == 0
    world.drop(A)
    for model, one in kept:
        assert world.load(model, one).gaps == ()
        world.check()
        world.retire(model)


def test_only_what_is_missing_is_a_gap_and_the_tail_goes_first() -> None:
    world = World(20)
    wanted = shape([1, 2, 3])
    first = world.load(A, wanted)
    world.retire(A)
    taken_bytes = world.pool.take_weights(PAGE, Hold.RETAINED)
    again = world.place(A, wanted)

    assert [gap.part.begin for gap in first.gaps] == [0, PAGE, 3 * PAGE]
    assert taken_bytes == 3 * PAGE
    assert [(gap.part.begin, gap.part.end) for gap in again.gaps] == [(3 * PAGE, 6 * PAGE)]
    world.check_tensors(A)


def test_a_tensor_has_its_place_but_no_padding_is_loaded() -> None:
    space = World(20).place(A, shape([0.25, 1.5]))

    assert [(gap.part.begin, gap.part.end) for gap in space.gaps] == [
        (0, PAGE // 4),
        (PAGE, PAGE + PAGE * 3 // 2),
    ]
    assert [len(gap.destination) for gap in space.gaps] == [PAGE // 4, PAGE * 3 // 2]


def test_narrow_bytes_land_at_the_end_of_the_wide_tensor() -> None:
    world = World(20)
    wanted = shape([1.5, 2], stored="bfloat16")
    space = world.pool.place(A, wanted)
    values = {spec.name: torch.randn(spec.shape).bfloat16() for spec in wanted.stored.tensors}
    for gap, spec in zip(space.gaps, wanted.stored.tensors, strict=True):
        gap.destination.copy_(values[spec.name].view(torch.uint8))
    for spec in wanted.served.tensors:
        place = space.places[spec.name]
        wide = place.base[place.offset : place.offset + spec.nbytes]
        wide.view(torch.float32).copy_(wide[spec.nbytes // 2 :].clone().view(torch.bfloat16))
    world.pool.load_ended(A, is_whole=True)

    for spec in wanted.served.tensors:
        place = space.places[spec.name]
        wide = place.base[place.offset : place.offset + spec.nbytes].view(torch.float32)
        assert torch.equal(wide, values[spec.name].float())


def test_weights_that_are_in_the_way_move_and_are_told_once() -> None:
    world = World(16)
    small = shape([2], workspace_bytes=0)
    for model in (A, B):
        world.load(model, small)
    world.drop(A)  # 2 free, 2 of B, 10 free, 2 sinks' pages of which one is free
    moved = world.places[B]["t0"].offset
    world.place(C, shape([12], workspace_bytes=0))
    told = world.pool.take_moved()

    assert moved == 2 * PAGE
    assert list(told) == [B]
    assert told[B]["t0"].offset == 0
    assert world.pool.take_moved() == {}
    assert world.pool.usage().moved_bytes == 2 * PAGE
    world.places[B] = dict(told[B])
    world.check()


def test_what_is_being_loaded_stays_where_it_is() -> None:
    world = World(16)
    world.load(A, shape([2], workspace_bytes=0))
    world.place(B, shape([2], workspace_bytes=0))
    world.drop(A)
    wanted = shape([12], workspace_bytes=0)

    assert world.pool.usage().free_bytes == 13 * PAGE
    assert world.pool.missing_bytes(C, wanted) > 0
    world.load_ended(B, is_whole=True)
    assert world.pool.missing_bytes(C, wanted) == 0


def test_a_load_that_failed_leaves_what_was_there_before() -> None:
    world = World(20)
    wanted = shape([1, 2, 3])
    world.load(A, wanted)
    world.pool.take_weights(PAGE, Hold.RETAINED)
    world.place(A, wanted)
    world.load_ended(A, is_whole=False)

    assert world.pool.usage().holdings[0].weights_bytes == 3 * PAGE
    assert [gap.part.begin for gap in world.place(A, wanted).gaps] == [3 * PAGE]


def test_other_bytes_under_the_same_name_take_the_place_of_the_old_ones() -> None:
    world = World(8)
    world.load(A, shape([6], digest="0", workspace_bytes=0))
    world.retire(A)
    other = shape([3, 4], digest="00", workspace_bytes=0)

    assert world.pool.missing_bytes(A, other) == 0
    assert len(world.load(A, other).gaps) == 2
    world.check()


def test_lacks_says_how_many_bytes_have_to_come_free() -> None:
    world = World(10)
    world.load(A, shape([6], workspace_bytes=0))
    wanted = shape([2, 2], workspace_bytes=PAGE)

    assert world.pool.missing_bytes(B, wanted) == (4 + 1 + 1 - 3) * PAGE
    with pytest.raises(
        DeviceError, match="`b` needs 24576 bytes of device memory more, 12288 of 40960 are free"
    ):
        world.pool.place(B, wanted)


def test_blocks_come_from_the_high_end_and_weights_from_the_low_one_behind_the_workspace() -> None:
    world = World(64)
    space = world.load(A, shape([4, 4], workspace_bytes=3 * PAGE))
    grown = world.grow(A, 8)

    assert space.workspace.data_ptr() == space.kv.data_ptr()
    assert [place.offset for place in space.places.values()] == [3 * PAGE, 7 * PAGE]
    assert space.sink == 63
    assert grown == [range(48, 56), range(56, 63)]


def test_blocks_come_in_batches_up_to_the_limit() -> None:
    world = World(65)
    world.load(A, shape([1], max_blocks=12))

    assert world.grow(A, 3) == [range(56, 64)]
    assert world.grow(A, 3) == [range(53, 56)]
    assert world.grow(A, 1) == []


def test_no_extent_is_larger_than_a_batch_so_that_what_is_lent_comes_back_by_pieces() -> None:
    world = World(64)
    world.load(A, shape([1], block_bytes=PAGE // 2))
    grown = world.grow(A, 50)

    assert sum(map(len, grown)) >= 50
    assert max(map(len, grown)) == BATCH_BLOCKS
    assert world.pool.usage().lost_bytes == PAGE // 2  # beside the sink: extents touch
    world.check()


def test_models_have_one_workspace_in_common_which_grows_for_a_larger_one() -> None:
    world = World(20)
    small = world.load(A, shape([2, 3], workspace_bytes=2 * PAGE))
    large = world.load(B, shape([4], workspace_bytes=4 * PAGE + 1))

    assert small.workspace.data_ptr() == large.workspace.data_ptr()
    assert world.pool.usage().workspace_bytes == 5 * PAGE
    world.check()  # what moved is where it was told
    world.retire(B)
    assert world.pool.usage().workspace_bytes == 2 * PAGE
    world.retire(A)
    assert world.pool.usage().workspace_bytes == 0
    world.check()


def test_a_workspace_is_elsewhere_where_one_that_is_being_loaded_is_in_the_way() -> None:
    world = World(30)
    world.place(A, shape([2], workspace_bytes=PAGE))
    space = world.load(B, shape([4], workspace_bytes=4 * PAGE))

    assert space.workspace.data_ptr() != world.spaces[A].workspace.data_ptr()
    assert world.pool.usage().workspace_bytes == 5 * PAGE
    world.load_ended(A, is_whole=True)
    world.check()
    world.retire(B)
    assert world.pool.usage().workspace_bytes == PAGE


def test_a_model_out_of_turn_gives_up_its_workspace_and_has_another_when_it_is_placed_again() -> None:
    world = World(16)
    large, small = shape([2], workspace_bytes=8 * PAGE), shape([6], workspace_bytes=2 * PAGE)
    world.load(A, large)
    world.holds[A] = Hold.PAUSED
    make_room(world, B, small)
    world.load(B, small)
    world.holds[B] = Hold.BUSY

    assert world.pool.take_workspaces(Hold.PAUSED) == 6 * PAGE
    assert world.pool.usage().workspace_bytes == 2 * PAGE, "only the one that computes has a workspace"
    assert world.pool.is_incomplete(A)
    assert not world.pool.is_incomplete(B)
    assert world.grow(B, 6)
    world.check()
    for extent in world.pool.kv.extents(B):
        world.shrink(B, extent)
    world.holds[B] = Hold.PAUSED
    make_room(world, A, large)

    assert len(world.load(A, large).workspace) == 8 * PAGE
    assert not world.pool.is_incomplete(A)
    world.check()


TURNS = st.lists(st.tuples(st.sampled_from(MODELS), st.integers(0, 12)), min_size=8, max_size=20)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 6), min_size=1, max_size=4),
            st.integers(1, 12),
            st.sampled_from([PAGE, 6000, 3 * PAGE]),
        ),
        min_size=3,
        max_size=3,
    ),
    TURNS,
)
def test_whoever_fits_alone_beside_what_the_others_keep_has_its_turn(
    sizes: list[tuple[list[int], int, int]], turns: list[tuple[ModelId, int]]
) -> None:
    """With the bytes that the gateway counts on, in every order of turns and with KV lent as it comes."""
    floor_blocks = 4
    shapes = {
        model: shape(pages, workspace_bytes=workspace * PAGE, tables_bytes=PAGE, block_bytes=block_bytes)
        for model, (pages, workspace, block_bytes) in zip(MODELS, sizes, strict=False)
    }
    promises = {model: promise_of(one, floor_blocks) for model, one in shapes.items()}
    budget_bytes = sum(one.standing_bytes for one in promises.values())
    budget_bytes += max(one.own_bytes - one.standing_bytes for one in promises.values())
    world = World(0, budget_bytes=aligned(budget_bytes))
    for model, num_blocks in turns:
        if model not in shapes:
            continue
        for other in world.spaces:
            world.holds[other] = Hold.PAUSED
        world.holds[model] = Hold.BUSY
        while lack_bytes := world.pool.missing_bytes(model, shapes[model]):
            assert give_way(world, lack_bytes, model, floor_blocks)
        world.load(model, shapes[model])
        wanted_blocks = floor_blocks + num_blocks
        while sum(map(len, world.blocks[model])) <= wanted_blocks:
            if not world.grow(model, 1) and not give_way(world, PAGE, model, wanted_blocks):
                break
        assert sum(map(len, world.blocks[model])) > floor_blocks, f"`{model}` lacks KV that it is promised"
        world.check()


def promise_of(wanted: Shape, floor_blocks: int) -> Promise:
    """Return what a model is promised by `policy/fleet/footprint.py`, with a workspace of its own in turn."""
    blocks_bytes = (1 + floor_blocks + 2 * MAX_EXTENTS) * wanted.block_bytes
    own_bytes = wanted.served.num_bytes + aligned(wanted.tables_bytes) + blocks_bytes
    standing_bytes = aligned(wanted.tables_bytes) + 3 * wanted.block_bytes
    return Promise(own_bytes + aligned(wanted.workspace_bytes), 0, standing_bytes)


def give_way(world: World, num_bytes: int, in_turn: ModelId, floor_blocks: int) -> int:
    """Make room in the order of `policy/memory/reclaim.py`; 0: nobody has anything to give."""
    return (
        world.pool.take_weights(num_bytes, Hold.PAUSED)
        or clear_one(world, in_turn, floor_blocks)
        or world.pool.take_workspaces(Hold.PAUSED)
    )


def clear_one(world: World, in_turn: ModelId, floor_blocks: int) -> bool:
    """Take back KV of a model out of turn, or what the one in turn has beyond its floor; False: no KV."""
    for model in sorted(world.spaces, key=lambda name: name == in_turn):
        num_spare = sum(map(len, world.blocks[model])) - (1 + floor_blocks if model == in_turn else 0)
        for extent in world.pool.kv.extents(model):
            if len(extent) <= num_spare:
                world.shrink(model, extent)
                return True
    return False


def test_what_is_promised_is_placed_whatever_was_placed_before_it() -> None:
    # Sinks, blocks and workspaces of those that stay lie at the ends, so all that is between them can move.
    sizes = {A: ([3, 2, 1], 4), B: ([2, 2], 5), C: ([4, 1], 3)}
    shapes = {
        model: shape(pages, workspace_bytes=workspace * PAGE) for model, (pages, workspace) in sizes.items()
    }
    floor_blocks = 4
    promises = {
        model: sum(pages) + workspace + 1 + floor_blocks for model, (pages, workspace) in sizes.items()
    }
    for first, second, third in permutations(sizes):
        world = World(promises[first] + promises[third])
        for model in (first, second):
            make_room(world, model, shapes[model])
            world.load(model, shapes[model])
            world.grow(model, floor_blocks)
            world.holds[model] = Hold.BUSY
        world.retire(second)
        world.holds[second] = Hold.RETAINED
        make_room(world, third, shapes[third])

        assert world.pool.missing_bytes(third, shapes[third]) == 0, f"{third} beside {first}"
        world.load(third, shapes[third])
        world.drop(second)
        while (num_blocks := sum(map(len, world.blocks[third]))) <= floor_blocks:
            if not world.grow(third, floor_blocks + 1 - num_blocks):
                world.shrink(first, world.pool.kv.extents(first)[0])  # what it was given beyond its floor
        world.check()


def test_a_picture_is_drawn_anew_only_of_what_has_changed() -> None:
    world = World(40)
    for model in (A, B):
        world.load(model, shape([2]))
    a, b = world.pool.usage().holdings
    world.grow(B, 1)
    same, other = world.pool.usage().holdings

    assert same is a
    assert other.kv_bytes > b.kv_bytes


def test_blocks_that_have_no_place_together_come_in_few_pieces() -> None:
    world = World(16)
    for model, pages in ((A, 3), (B, 2), (C, 5)):
        world.load(model, shape([pages], workspace_bytes=0))
    world.drop(A)  # 3 pages and a sink's
    left_pages = world.pool.usage().free_bytes // PAGE
    grown = world.grow(B, 100)

    assert left_pages == sum(map(len, grown)) == 7
    assert len(grown) == 3
    assert world.grow(B, 1) == []
    world.check()


def test_the_lowest_extent_is_given_back_first_for_tensors_are_next_to_it() -> None:
    world = World(65)
    world.load(A, shape([2], workspace_bytes=0))
    high, low = world.grow(A, 16), world.grow(A, 8)

    assert world.pool.kv.extents(A) == [*low, *high]
    world.shrink(A, low[0])
    assert world.pool.kv.extents(A) == high


def test_a_growth_that_was_in_vain_is_not_tried_again_before_something_has_changed() -> None:
    num_plans = 0

    def counted(regions: Sequence[Region], items: Sequence[Item]) -> Packing | None:
        nonlocal num_plans
        num_plans += 1
        return pack(regions, items)

    world = World(12, counted)
    world.load(A, shape([2], block_bytes=4 * PAGE, workspace_bytes=0))
    world.load(B, shape([3], workspace_bytes=0))
    assert world.grow(A, 1) == []
    before = num_plans

    assert world.grow(A, 1) == []
    assert num_plans == before
    world.drop(B)
    assert len(world.grow(A, 1)) == 1


def test_who_was_never_placed_has_nothing_to_vacate() -> None:
    world = World(8)
    world.pool.retire(A)

    assert world.pool.usage().holdings == ()


def test_free_pieces_that_are_too_small_for_a_block_become_one() -> None:
    others = [ModelId(name) for name in "defg"]
    world = World(18)
    world.load(A, shape([1], workspace_bytes=0, block_bytes=3 * PAGE))
    for model in others:
        world.load(model, shape([2], workspace_bytes=0))
    for model in others[::2]:
        world.drop(model)  # which leaves two pages free at a time, and never three

    assert world.pool.usage().free_bytes == 8 * PAGE
    assert len(world.grow(A, 1)) == 1
    assert world.pool.usage().moved_bytes > 0
    world.check()


def test_blocks_of_any_size_lie_at_multiples_of_it_and_overlap_nothing() -> None:
    world = World(40)
    for model, block_bytes in ((A, 5000), (B, 700), (C, 3 * PAGE)):
        world.load(model, shape([1], workspace_bytes=100, block_bytes=block_bytes))
        world.grow(model, 5)
    spans = sorted(
        (extent.start * world.shapes[model].block_bytes, extent.stop * world.shapes[model].block_bytes)
        for model, extents in world.blocks.items()
        for extent in extents
    )

    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert world.pool.usage().lost_bytes > 0
    world.check()


def test_an_arena_of_no_whole_pages_loses_the_rest() -> None:
    world = World(0, budget_bytes=3 * PAGE + 100)

    assert world.pool.budget_bytes == 3 * PAGE + 100
    assert (world.pool.usage().free_bytes, world.pool.usage().lost_bytes) == (3 * PAGE, 100)
    with pytest.raises(DeviceError, match="a pool needs at least 4096 bytes, given: 100"):
        World(0, budget_bytes=100)
