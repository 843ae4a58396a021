"""Who gives way when a model needs memory on this worker: carries out the order that `memory/pool.py` names.

    free memory, KV that nobody reads, weights of retained models, of warm ones, KV of running requests

Each is touched only when all before it is used up. The gateway promises hosted models no more than there is,
so whatever is promised can be had: what a model has beyond its promise is lent, and comes back in this order.
All of it happens on the step thread, between steps. It loads nothing and steps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from hearth.engine.engine import StepOutcome
from hearth.errors import DeviceError
from hearth.memory.pool import EvictionTerms, EvictionTermsOf, Pool, Space
from hearth.types import Hold, ModelId
from hearth.worker.failure import ModelBroke
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.worth import Worth


class Reclaimer:
    """Mutable; the step thread alone calls it."""

    def __init__(
        self, new_pool: Callable[[EvictionTermsOf], Pool], hosts: Mapping[ModelId, HostedModel]
    ) -> None:
        """`hosts` are the hosted models, kept by whoever calls."""
        self.pool = new_pool(self.regard)
        self.worth = Worth()
        self._hosts = hosts
        #: Counts what may have made room: memory given back, requests that ended, a model that is held less.
        self.generation = 0
        #: By model that wanted to grow: the generation in which it found no free memory, and in which nobody
        #: could give way. Until that has passed another look would be in vain, and one before every step
        #: would cost more than it ever brings. What a model is promised is had all the same.
        self._found_none: dict[ModelId, int] = {}
        self._was_refused: dict[ModelId, int] = {}
        self._placing: ModelId | None = None  #: nothing is taken from a model for itself

    def regard(self, model: ModelId) -> EvictionTerms:
        """As the pool looks at a model; one that is not hosted is retained."""
        cost_s_per_byte = self.worth.cost_s_per_byte(model, time.monotonic())
        host = self._hosts.get(model)
        if model == self._placing:
            return EvictionTerms(Hold.BUSY, cost_s_per_byte, is_loading=False)
        if host is None:
            return EvictionTerms(Hold.RETAINED, cost_s_per_byte, is_loading=False)
        return EvictionTerms(host.regarded, cost_s_per_byte, is_loading=host.is_settling)

    def changed(self) -> None:
        """There may be room where there was none."""
        self.generation += 1

    # Weights.

    def place(self, model: ModelId, plan: HostingSpec) -> Space:
        """A place for all weights of a model that is promised one.

        Raises:
            DeviceError: what is promised cannot be had.
        """
        self._placing = model
        try:
            while (lack_bytes := self.pool.lacks(model, plan.shape)) > 0:
                if not self._free(lack_bytes, may_preempt=True):
                    raise DeviceError(self._shortage(model, plan, lack_bytes))
            space = self.pool.place(model, plan.shape)
        finally:
            self._placing = None
        self._follow_moves()
        return space

    def retire(self, host: HostedModel) -> None:
        """An idle model gives back all but its weights."""
        if host.engine is not None:
            host.engine.batcher.blocks.remove_all()
        if host.plan is not None:  # else it has no place yet
            self.pool.vacate(host.model)
        self.changed()

    def drop(self, model: ModelId) -> None:
        """All of it goes, once nobody computes with it any more."""
        self.pool.drop(model)
        self._found_none.pop(model, None)
        self._was_refused.pop(model, None)
        self.changed()

    # KV.

    def before_step(self, host: HostedModel) -> None:
        """Give a model the KV that its next step wants, as far as it can be had without harm."""
        engine, plan = host.engine, host.plan
        assert engine is not None, f"`{host.model}` can step"
        assert plan is not None, f"`{host.model}` can step"
        use = engine.kv_use()
        growth = engine.elastic.growth(use)
        most = plan.shape.max_blocks - 1 - use.num_blocks  # the sink is no block of the book
        now = min(growth.now_blocks, most)
        ahead = min(growth.ahead_blocks, most - now)
        if now <= 0 and ahead <= 0:
            return
        model, short = host.model, now
        if self._found_none.get(model) != self.generation:
            short -= self._grow(host, now, ahead)
        if short <= 0:
            return
        self._found_none[model] = self.generation
        short -= engine.batcher.cached_to_spare()  # its own cached blocks go before those of others
        if short > 0 and self._was_refused.get(model) != self.generation:
            short -= self._grow_by_force(host, short, ahead, is_promised=False)
        promised = min(short, plan.floor_blocks - engine.batcher.blocks.num_blocks)
        if promised > 0:
            short -= self._grow_by_force(host, promised, 0, is_promised=True)
        if short > 0:
            self._was_refused[model] = self.generation

    def after_step(self, host: HostedModel, outcome: StepOutcome) -> None:
        """Take back the KV that a model has not used for long, or does not use now that it is idle."""
        engine = host.engine
        assert engine is not None, f"`{host.model}` has stepped"
        use = engine.kv_use()
        surplus = engine.elastic.surplus_blocks(use) if host.has_work else use.num_free
        is_smaller = surplus > 0 and self._give_back(host, surplus)
        has_let_go = bool(outcome.preempted) or any(one.finish_reason for one in outcome.outputs)
        if is_smaller or has_let_go or not host.has_work:
            self.changed()

    def _give_back(self, host: HostedModel, num_blocks: int) -> bool:
        """Up to so many blocks, none of them cached: nobody needs them yet."""
        engine, num_before = host.engine, num_blocks
        assert engine is not None, f"`{host.model}` has stepped"
        for extent in self._extents(host):
            if len(extent) > num_blocks or engine.batcher.blocks.cached_in(extent):
                continue
            if not engine.clear(extent, may_move=self.pool.keeps_addresses, may_preempt=False):
                continue
            self.pool.shrink(host.model, extent)
            num_blocks -= len(extent)
        return num_blocks < num_before

    def _extents(self, host: HostedModel) -> Iterator[range]:
        """Those that may go, also where one is only known once the one before it has gone."""
        while extents := self.pool.extents(host.model):
            yield from extents
            if extents == self.pool.extents(host.model):
                return

    def _grow_by_force(
        self, host: HostedModel, num_blocks: int, ahead_blocks: int, *, is_promised: bool
    ) -> int:
        """Have others give way until it has so many blocks more, or nobody can. Returns how many it got.

        With those that it will want next, so that it does not come again for every step. Not all that comes
        free need be of use: in an arena a block has to lie at a multiple of its size. Others are not stripped
        for that: what is not promised is given up when what came free was of no use twice.
        """
        assert host.plan is not None, f"`{host.model}` can step"
        given, num_bytes, num_useless = 0, host.plan.shape.block_bytes, 0
        while given < num_blocks and (is_promised or num_useless < 2):
            wanted = num_blocks - given
            if not self._free((wanted + ahead_blocks) * num_bytes, may_preempt=is_promised, beside=host):
                break
            got = self._grow(host, wanted, ahead_blocks)
            if not got and self.pool.keeps_addresses:  # any page fits, and there are not enough of them
                break
            given += got
            num_useless = 0 if got else num_useless + 1
        return given

    def _grow(self, host: HostedModel, num_blocks: int, ahead_blocks: int = 0) -> int:
        engine = host.engine
        assert engine is not None, f"`{host.model}` can step"
        extents = self.pool.grow(host.model, num_blocks, ahead_blocks)
        self._follow_moves()
        for extent in extents:
            engine.add_blocks(extent)
        return sum(map(len, extents))

    # Making room.

    def _free(self, num_bytes: int, *, may_preempt: bool, beside: HostedModel | None = None) -> int:
        """Have at least so many bytes come free, or as many as can; returns how many."""
        freed = self._free_kv(num_bytes, beside, may_preempt=False)
        for most in (Hold.RETAINED, Hold.WARM):
            if freed < num_bytes:
                freed += self._take(num_bytes - freed, most)
        if freed < num_bytes and may_preempt:
            freed += self._free_kv(num_bytes - freed, beside, may_preempt=True)
        if freed:
            self.changed()  # it may be more than whoever asked makes use of
        return freed

    def _take(self, num_bytes: int, most: Hold) -> int:
        """Weights of idle models; they have to settle again before they can step."""
        freed = self.pool.take(num_bytes, most)
        # Also where nothing came free: what models share is taken from one of them, and stays with the other.
        for holding in self.pool.picture().holdings:
            host = self._hosts.get(holding.model)
            is_partial = holding.weights_bytes < holding.total_bytes
            if host is not None and host.is_loaded and is_partial:
                host.lost()
        return freed

    def _free_kv(self, num_bytes: int, beside: HostedModel | None, *, may_preempt: bool) -> int:
        """Of models that are held least, first; of running requests only what is beyond a model's floor."""
        freed = 0
        for host in sorted(self._hosts.values(), key=lambda host: (host.regarded, host.model)):
            if host is beside or host.engine is None or host.plan is None:
                continue
            while (
                freed < num_bytes and (extent := self._clear_one(host, may_preempt=may_preempt)) is not None
            ):
                self.pool.shrink(host.model, extent)
                freed += len(extent) * host.plan.shape.block_bytes
        return freed

    def _clear_one(self, host: HostedModel, *, may_preempt: bool) -> range | None:
        """Have one extent of a model's KV hold nothing that anybody reads. None: there is no such extent.

        What a busy model will fill next it keeps, as long as nobody has to be preempted for it: two that are
        full would take the same blocks from each other in turns.
        """
        engine, plan = host.engine, host.plan
        assert engine is not None, f"`{host.model}` has KV"
        assert plan is not None, f"`{host.model}` has KV"
        blocks = engine.batcher.blocks
        spare = blocks.num_blocks if may_preempt else blocks.num_available - engine.reserve_blocks
        for extent in self.pool.extents(host.model):
            if len(extent) > spare:
                continue
            is_lent = blocks.num_blocks - len(extent) >= plan.floor_blocks
            may_end = may_preempt and (is_lent or not host.has_work)
            with _blaming(host.model):
                is_clear = engine.clear(extent, may_move=self.pool.keeps_addresses, may_preempt=may_end)
            if is_clear:
                return extent
        return None

    def _follow_moves(self) -> None:
        for model, places in self.pool.take_moved().items():
            with _blaming(model):
                self._hosts[model].rebind(places)

    def _shortage(self, model: ModelId, plan: HostingSpec, lack_bytes: int) -> str:
        picture, shape = self.pool.picture(), plan.shape
        others = (one for one in picture.holdings if one.model != model)
        held = ", ".join(f"{one.model} {one.weights_bytes + one.kv_bytes}" for one in others)
        return (
            f"`{model}` needs {shape.served.num_bytes} bytes for weights and {shape.workspace_bytes} for the "
            f"workspace, {lack_bytes} more than can be freed of {picture.budget_bytes}; others have: "
            f"{held or 'nothing'}; drop another model, or raise `service.memory_bytes`"
        )

    def kv_shortage(self, host: HostedModel) -> DeviceError:
        """What is said of a model that waits for KV in vain."""
        assert host.engine is not None, f"`{host.model}` has requests"
        assert host.plan is not None, f"`{host.model}` has requests"
        use, picture = host.engine.kv_use(), self.pool.picture()
        return DeviceError(
            f"`{host.model}` has {use.num_blocks} blocks of KV of {host.plan.shape.block_bytes} bytes, wants "
            f"{use.num_wanted} and is promised {host.plan.floor_blocks} in all, but {picture.free_bytes} of "
            f"{picture.budget_bytes} bytes are free and nobody can give way; drop another model, or raise "
            "`service.memory_bytes`"
        )


@contextmanager
def _blaming(model: ModelId) -> Iterator[None]:
    """Whatever breaks is this model's fault, and not that of the one it gives way to."""
    try:
        yield
    except Exception as error:  # it is only renamed: the step loop handles it as it does all others
        raise ModelBroke(model, error) from error
