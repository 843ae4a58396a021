"""The profile of a deployed model for placement, and the device memory that the model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hearth.core.types import ModelId


@dataclass(frozen=True, slots=True)
class Promise:
    own_bytes: int  #: for the model alone
    workspace_bytes: int  #: shared by all models, if the pool can
    standing_bytes: int = 0  #: of `own_bytes`, what it keeps out of turn

    @property
    def unshared(self) -> Promise:
        """The same promise for a pool that may have to give every model in turn its own workspace."""
        return Promise(self.own_bytes + self.workspace_bytes, 0, self.standing_bytes)


NOTHING_PROMISED = Promise(0, 0)


@dataclass(frozen=True, slots=True)
class Footprint:
    fixed_bytes: int  #: weights, workspace and tables: all but KV
    min_kv_bytes: int  #: promised; below this it cannot be served
    max_kv_bytes: int  #: limit; KV beyond the minimum is lent
    workspace_bytes: int = 0  #: of `fixed_bytes`, shared by all models of a worker
    tables_bytes: int = 0  #: of `fixed_bytes`, those that its engine always has
    sink_bytes: int = 0  #: of `min_kv_bytes`, never given up
    max_seqs: int = 1  #: requests that it runs at a time

    @property
    def weights_bytes(self) -> int:
        return self.fixed_bytes - self.workspace_bytes - self.tables_bytes

    @property
    def least_bytes(self) -> int:
        return self.fixed_bytes + self.min_kv_bytes

    @property
    def promise(self) -> Promise:
        standing_bytes = self.tables_bytes + self.sink_bytes
        return Promise(self.least_bytes - self.workspace_bytes, self.workspace_bytes, standing_bytes)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    model: ModelId
    num_bytes: int  #: to be loaded
    footprints: Mapping[str, Footprint]  #: by kind of device
    keep_alive_s: float  #: idle for longer, it is retained
    is_pinned: bool = False
    weight: float = 1.0  #: of a second of its start, in its reload cost
    digest: str = ""  #: of its bytes
