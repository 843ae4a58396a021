"""One model in a pool, its KV elastic or reserved, and others that fill the rest of the memory.

The model is stepped as a worker steps it, with the worker's own reclaimer. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import torch

from hearth.core.config import EngineConfig
from hearth.core.messages import HostModel
from hearth.core.types import Hold, ModelId
from hearth.engine.assemble import (
    Memory,
    ModelSpec,
    assemble,
    block_bytes,
    own_limits,
    tables_bytes,
    workspace_bytes,
)
from hearth.engine.engine import Engine, StepOutcome
from hearth.memory.pool import EvictionTermsOf, Pool, Shape, Space
from hearth.models.arch import Arch
from hearth.models.dtypes import DTYPES
from hearth.models.layout import ALIGNMENT_BYTES, Layout, TensorSpec, layout_of
from hearth.models.weights import Weights, bind
from hearth.store.format.manifest import Chunk, Manifest, digest_of
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.hosting_state import Loaded, ServedModel
from hearth.worker.reclaimer import Reclaimer

SERVED = ModelId("served")


class Arm(StrEnum):
    ELASTIC = "elastic"  #: KV is grown and shrunk around each step
    FIXED = "fixed"  #: the same engine has all of it from the beginning
    PLAIN = "plain"  #: another engine over the same weights, its KV one tensor of torch's own


@dataclass(frozen=True)  # no slots: what is derived is kept
class Body:
    """A model and how much memory it is to have."""

    arch: Arch
    dtype: str
    max_context: int  #: of which one is promised to it
    config: EngineConfig
    device: torch.device
    kv_blocks: int  #: for which the pool has room, when nothing else is there
    page_bytes: int  #: of the pool: it gives and takes memory by so much

    @cached_property
    def spec(self) -> ModelSpec:
        dtype = DTYPES[self.dtype]
        limits = own_limits(self.config, self.arch, dtype, self.device)
        return ModelSpec(self.arch, dtype, self.max_context, limits, frozenset())

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.arch, self.dtype)

    @cached_property
    def block_bytes(self) -> int:
        return block_bytes(self.spec)

    @cached_property
    def workspace_bytes(self) -> int:
        return workspace_bytes(self.spec, self.device)

    @cached_property
    def tables_bytes(self) -> int:
        return tables_bytes(self.spec)

    @property
    def margin_bytes(self) -> int:
        """Return what rounding may take."""
        return 2 * max(self.page_bytes, self.block_bytes)

    @property
    def budget_bytes(self) -> int:
        kv_bytes = (1 + self.kv_blocks) * self.block_bytes
        sizes = (self.layout.num_bytes, self.workspace_bytes, self.tables_bytes, kv_bytes)
        return sum(-(-size // self.page_bytes) * self.page_bytes for size in sizes)

    @cached_property
    def plan(self) -> HostingSpec:
        sizes = range(0, self.layout.num_bytes, self.page_bytes)
        chunks = tuple(Chunk(digest_of(f"{SERVED} {at}".encode()), self.page_bytes) for at in sizes)
        manifest = Manifest.of(self.arch, self.dtype, "none", chunks, self.page_bytes, {})
        shape = self.shape(manifest.digest, self.layout, self.workspace_bytes, self.tables_bytes)
        return HostingSpec(
            manifest, self.spec, self.layout, shape, blocks_for(1, self.max_context, self.config)
        )

    def shape(self, name: str, layout: Layout, workspace_bytes: int, tables_bytes: int) -> Shape:
        """Return the shape of this model, or of another one beside it."""
        starts = range(0, layout.num_bytes, self.page_bytes)
        return Shape(
            digest=digest_of(name.encode()),
            stored=layout,
            served=layout,
            chunk_bytes=self.page_bytes,
            chunks=tuple(Chunk(digest_of(f"{name} {at}".encode()), self.page_bytes).id for at in starts),
            workspace_bytes=workspace_bytes,
            tables_bytes=tables_bytes,
            block_bytes=self.block_bytes,
            max_blocks=1 + self.kv_blocks,
        )


class Stage:
    """A pool with one model that is served, and others that come and go. Mutable; one thread calls it."""

    def __init__(self, body: Body, new_pool: Callable[[EvictionTermsOf], Pool]) -> None:
        self.body = body
        self._hosted: dict[ModelId, HostedModel] = {}
        self._reclaimer = Reclaimer(new_pool, self._hosted, due_in_s=lambda model: 0.0)
        self.pool = self._reclaimer.pool
        self._fillers: set[ModelId] = set()
        self._num_fillers = 0
        plan = body.plan
        space = self._reclaimer.place(SERVED, plan)
        self.pool.prepare_rest(SERVED)
        for gap in space.gaps:
            self.pool.prepare(SERVED, gap.part)
        weights = _random_weights(body, space)
        self.pool.load_ended(SERVED, is_whole=True)
        memory = Memory(space.workspace, space.tables, space.kv, space.sink, plan.floor_blocks)
        self.engine = assemble(body.spec, weights, body.config, body.device, memory)
        self.engine.runner.fill_tables()
        self._served = ServedModel(plan, self.engine)
        self._hosted[SERVED] = self._pinned(SERVED)
        self._hosted[SERVED].state = Loaded(self._served)
        self._weights = weights
        self._plain: Engine | None = None

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the pool that KV of the served model has, pages that lie ready included."""
        (holding,) = (one for one in self.pool.usage().holdings if one.model == SERVED)
        return holding.kv_bytes

    @property
    def filler_bytes(self) -> int:
        """Return the bytes of other models' weights that are still there."""
        return sum(one.weights_bytes for one in self.pool.usage().holdings if one.model in self._fillers)

    def engine_of(self, arm: Arm) -> Engine:
        if arm is not Arm.PLAIN:
            return self.engine
        if self._plain is None:
            body = self.body
            own = replace(body.config, kv_bytes=(1 + body.kv_blocks) * body.block_bytes)
            self._plain = assemble(body.spec, self._weights, own, body.device)
        return self._plain

    def drop_plain(self) -> None:
        """Give back the memory of the plain engine."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None
        if self.body.device.type == "cuda":
            torch.cuda.empty_cache()

    def step_of(self, arm: Arm) -> Callable[[], StepOutcome]:
        return self._step_elastic if arm is Arm.ELASTIC else self.engine_of(arm).step

    def set_up(self, arm: Arm) -> None:
        """Prepare a run: KV is as the arm begins with it, and pages are no longer where they were."""
        if arm is Arm.PLAIN:
            return
        assert not self.engine.has_work, "a run is still under way"
        self.drop_fillers()
        self._give_back_kv()
        self.fill_with_weights()
        self.drop_fillers()
        if arm is Arm.FIXED:
            while extents := self.pool.kv.grow(SERVED, self.body.kv_blocks):
                for extent in extents:
                    self.engine.add_blocks(extent)

    def fill_with_weights(self, num_models: int = 4) -> None:
        """Let other models come and go: their weights take all memory that nobody computes with."""
        lent_bytes = self.engine.batcher.kv.use().num_blocks * self.body.block_bytes
        num_bytes = self.pool.usage().free_bytes + lent_bytes - self.body.margin_bytes
        num_pages = num_bytes // self.body.page_bytes
        for number in range(num_models):
            share = num_pages * (number + 1) // num_models - num_pages * number // num_models
            self._fillers.add(self._fill(share * self.body.page_bytes))
        self.synchronize()

    def drop_fillers(self) -> None:
        for filler in self._fillers:
            self._reclaimer.drop(filler)
        self._fillers.clear()

    def limit_kv(self, num_blocks: int) -> None:
        """Take all memory for good but what so many blocks need."""
        self.set_up(Arm.ELASTIC)
        lent_bytes = self.engine.batcher.kv.use().num_blocks * self.body.block_bytes
        spare_bytes = self.pool.usage().free_bytes + lent_bytes - num_blocks * self.body.block_bytes
        num_bytes = (spare_bytes - self.body.margin_bytes) // self.body.page_bytes * self.body.page_bytes
        assert num_bytes > 0, f"{num_blocks=} are all there are: {self.pool.usage()}"
        pinned = self._fill(num_bytes)
        self._hosted[pinned] = self._pinned(pinned)

    def synchronize(self) -> None:
        if self.body.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.drop_plain()
        self.engine.close()

    def _give_back_kv(self) -> None:
        """Give the pool all KV that it takes; the engine is told of many pages at once, which is faster."""
        begin = end = 0
        while extents := self.pool.kv.extents(SERVED):
            extent = extents[0]
            self.pool.kv.shrink(SERVED, extent)
            if extent.stop != begin:
                self._forget_blocks(range(begin, end))
                end = extent.stop
            begin = extent.start
        self._forget_blocks(range(begin, end))

    def _forget_blocks(self, run: range) -> None:
        if run:
            is_clear = self.engine.clear(run, may_move=False, may_preempt=False)
            assert is_clear, f"somebody reads {run}"

    def _step_elastic(self) -> StepOutcome:
        self._reclaimer.before_step(SERVED, self._served)
        outcome = self.engine.step()
        self._reclaimer.after_step(SERVED, self._served, outcome)
        return outcome

    def _pinned(self, model: ModelId) -> HostedModel:
        """Return a hosted model whose weights are never taken. How one gets there needs a keeper."""
        plan = self.body.plan
        sizes = plan.model.max_context, plan.model.limits, 0, 0
        order = HostModel(model, 0, "", plan.manifest.digest, 1.0, *sizes, ())
        hosted = HostedModel(order, None, self.pool, lambda *_: None)  # type: ignore[arg-type] # loads nothing
        hosted.hold = Hold.PINNED
        return hosted

    def _fill(self, num_bytes: int) -> ModelId:
        """Leave the weights of a model that was hosted and is not any more."""
        self._num_fillers += 1
        model = ModelId(f"filler{self._num_fillers}")
        layout = _layout_of_bytes(num_bytes, self.body.page_bytes)
        plan = replace(
            self.body.plan, layout=layout, shape=self.body.shape(model, layout, ALIGNMENT_BYTES, 0)
        )
        for gap in self._reclaimer.place(model, plan).gaps:
            self.pool.prepare(model, gap.part)
        self.pool.load_ended(model, is_whole=True)
        self.pool.retire(model)
        self._reclaimer.policy.note_freed()
        return model


def _random_weights(body: Body, space: Space) -> Weights:
    generator = torch.Generator(body.device).manual_seed(1)
    for spec in body.layout.tensors:
        place = space.places[spec.name]
        tensor = place.base[place.offset : place.offset + spec.nbytes].view(body.spec.dtype)
        if "norm" in spec.name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02, generator=generator)
    return bind(body.arch, body.layout, space.places)


def _layout_of_bytes(num_bytes: int, unit_bytes: int) -> Layout:
    """Return the layout of a model that nobody computes: so many bytes in tensors of one size."""
    unit_bytes = -(-unit_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(tuple(_units(num_bytes, unit_bytes)), num_bytes)


def _units(num_bytes: int, unit_bytes: int) -> Iterator[TensorSpec]:
    for number, at in enumerate(range(0, num_bytes, unit_bytes)):
        yield TensorSpec(f"layers.{number}.weight", "int8", (min(unit_bytes, num_bytes - at),), at)


def blocks_for(num_seqs: int, num_tokens: int, config: EngineConfig) -> int:
    """Return the blocks that so many sequences of so many tokens fill."""
    return num_seqs * -(-num_tokens // config.block_tokens)
