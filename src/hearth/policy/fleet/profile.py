"""The profile of a deployed model for placement, and the device memory that the model needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hearth.core.types import ModelId

#: Members of a pipeline.
MIN_STAGES, MAX_STAGES = 2, 8


@dataclass(frozen=True, slots=True)
class Promise:
    own_bytes: int  #: for the model alone
    workspace_bytes: int  #: shared by all models, if the pool can
    standing_bytes: int = 0  #: of `own_bytes`, what it keeps out of turn

    @property
    def unshared(self) -> Promise:
        """The same promise for a pool that may have to give every model in turn its own workspace."""
        own_bytes = self.own_bytes + self.workspace_bytes
        is_always_in_turn = self.standing_bytes == self.own_bytes
        return Promise(own_bytes, 0, own_bytes if is_always_in_turn else self.standing_bytes)


NOTHING_PROMISED = Promise(0, 0)


@dataclass(frozen=True)
class Footprint:
    fixed_bytes: int  #: weights, workspace and tables: all but KV
    min_kv_bytes: int  #: promised; below this it cannot be served
    max_kv_bytes: int  #: limit; KV beyond the minimum is lent
    workspace_bytes: int = 0  #: of `fixed_bytes`, shared by all models of a worker
    tables_bytes: int = 0  #: of `fixed_bytes`, those that its engine always has
    sink_bytes: int = 0  #: of `min_kv_bytes`, never given up
    max_seqs: int = 1  #: requests that it runs at a time
    keeps_all: bool = False  #: a stage of a pipeline takes no turns
    kv_token_bytes: int = 0  #: KV of one token; 0: unknown

    @property
    def weights_bytes(self) -> int:
        return self.fixed_bytes - self.workspace_bytes - self.tables_bytes

    @cached_property
    def least_bytes(self) -> int:
        return self.fixed_bytes + self.min_kv_bytes

    @cached_property
    def promise(self) -> Promise:
        own_bytes = self.least_bytes - self.workspace_bytes
        standing_bytes = own_bytes if self.keeps_all else self.tables_bytes + self.sink_bytes
        return Promise(own_bytes, self.workspace_bytes, standing_bytes)


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of weights by part of a model, with padding."""

    layer_bytes: int  #: of each layer
    first_bytes: int  #: of the embedding, which the first stage has
    last_bytes: int  #: of the head, which the last stage has: with a tied embedding, that again

    def of(self, num_layers: int, *, is_first: bool, is_last: bool) -> int:
        num_bytes = num_layers * self.layer_bytes + is_first * self.first_bytes
        return num_bytes + is_last * self.last_bytes


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Sizes by which the memory of any stage of a model is computed. A stage has consecutive layers.

    Stages take no turns. One full context is promised; more KV is lent, the same blocks on all stages.
    """

    num_layers: int  #: of the whole model
    stored: PartBytes
    placed: PartBytes  #: as on the device: widened, for a CPU
    spare_bytes: int  #: that the weights of any stage take beyond their own
    unit_bytes: int  #: in which memory is given
    kv_layer_bytes: int  #: of one layer of a block
    kv_unit_bytes: int  #: in which KV is given
    num_lost_blocks: int  #: that KV may lose to its alignment
    workspace_bytes: int
    tables_bytes: int
    context_blocks: int  #: of one full context
    max_seqs: int

    @property
    def max_blocks(self) -> int:
        return self.max_seqs * self.context_blocks

    def block_bytes(self, num_layers: int) -> int:
        return num_layers * self.kv_layer_bytes

    def footprint(self, num_layers: int, *, is_first: bool, is_last: bool) -> Footprint:
        block_bytes = self.block_bytes(num_layers)
        placed_bytes = self.placed.of(num_layers, is_first=is_first, is_last=is_last) + self.spare_bytes
        weights_bytes = _up_to(placed_bytes, self.unit_bytes) + self.num_lost_blocks * block_bytes
        kv_bytes, max_kv_bytes = (  # with the sink
            _up_to((1 + num_blocks) * block_bytes, self.kv_unit_bytes)
            for num_blocks in (self.context_blocks, self.max_blocks)
        )
        return Footprint(
            fixed_bytes=weights_bytes + self.workspace_bytes + self.tables_bytes,
            min_kv_bytes=kv_bytes,
            max_kv_bytes=max_kv_bytes,
            workspace_bytes=self.workspace_bytes,
            tables_bytes=self.tables_bytes,
            max_seqs=self.max_seqs,
            keeps_all=True,
        )

    def smallest(self, num_stages: int) -> Footprint:
        """Return a stage as large as at least one of any pipeline of so many stages."""
        num_layers = -(-self.num_layers // num_stages)
        return self.footprint(num_layers, is_first=False, is_last=False)

    def most_layers(self, fits: Callable[[Footprint], bool], *, is_first: bool, is_last: bool) -> int:
        """Return how many layers a worker can hold, given which stages fit there."""

        def is_too_large(num_layers: int) -> bool:
            return not fits(self.footprint(num_layers, is_first=is_first, is_last=is_last))

        return bisect_left(range(1, self.num_layers + 1), True, key=is_too_large)

    def split(
        self, fits: Sequence[Callable[[Footprint], bool]], head_layers: float | None = None
    ) -> list[int] | None:
        """Return how many layers each worker gets, given which stages fit on each; None: they do not fit.

        The slowest stage is as fast as it can be. `head_layers`: how many layers take as long as the head;
        None: not measured, so by its bytes, which a step reads as it reads layers.
        """
        if head_layers is None:
            head_layers = self.stored.last_bytes / self.stored.layer_bytes
        last = len(fits) - 1
        most = [self.most_layers(one, is_first=at == 0, is_last=at == last) for at, one in enumerate(fits)]
        if not all(most) or sum(most) < self.num_layers or len(fits) > self.num_layers:
            return None
        shares = [1] * len(fits)
        for _ in range(self.num_layers - len(fits)):
            open_ = [at for at, share in enumerate(shares) if share < most[at]]
            _, at = min((shares[at] + (at == last) * head_layers, at) for at in open_)
            shares[at] += 1
        return shares


@dataclass(frozen=True, slots=True)
class ModelProfile:
    model: ModelId
    num_bytes: int  #: to be loaded
    footprints: Mapping[str, Footprint]  #: by the kind of workers that it may run on
    keep_alive_s: float  #: idle for longer, it is retained
    is_pinned: bool = False
    weight: float = 1.0  #: of a second of its start, in its reload cost
    digest: str = ""  #: of its bytes
    labels: tuple[str, ...] = ()  #: that the nodes of its workers must have
    min_replicas: int = 0  #: kept if it is pinned, at least one
    max_replicas: int | None = None  #: that are loaded for load; None: any number
    may_drop: bool = False  #: its replicas may give up layers for KV
    #: By the kind of workers; empty: the model was deployed before stages were known.
    stages: Mapping[str, StageSizes] = field(default_factory=dict)


def _up_to(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes
