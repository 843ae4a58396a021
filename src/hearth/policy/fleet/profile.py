"""The profile of a deployed model for placement, and the device memory that the model needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hearth.core.types import ModelId


@dataclass(frozen=True, slots=True)
class Promise:
    """Device memory that a worker owes a hosted model."""

    own_bytes: int  #: for the model alone
    workspace_bytes: int  #: one for all models, as large as the largest needs, where the pool can share it
    standing_bytes: int = 0  #: of `own_bytes`, what it has also while it waits for its turn

    @property
    def unshared(self) -> Promise:
        """The same promise for a pool that may have to give every model in turn its own workspace."""
        return Promise(self.own_bytes + self.workspace_bytes, 0, self.standing_bytes)


NOTHING_PROMISED = Promise(0, 0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Device memory that a model takes on one kind of device."""

    fixed_bytes: int  #: weights, workspace and tables: all but KV
    min_kv_bytes: int  #: promised to it, however much others want; below this it cannot be served
    max_kv_bytes: int  #: it never has more; what is between is lent out by its worker
    workspace_bytes: int = 0  #: of `fixed_bytes`, what all models of a worker see, one after the other
    tables_bytes: int = 0  #: of `fixed_bytes`, what its engine has besides, always
    sink_bytes: int = 0  #: of `min_kv_bytes`, what its engine never gives up
    max_seqs: int = 1  #: requests that it runs at a time, for which its memory is sized

    @property
    def weights_bytes(self) -> int:
        """Weights, with what is lost to loading and placing them."""
        return self.fixed_bytes - self.workspace_bytes - self.tables_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that a worker without other models must promise."""
        return self.fixed_bytes + self.min_kv_bytes

    @property
    def promise(self) -> Promise:
        """The least promise beside other models."""
        standing_bytes = self.tables_bytes + self.sink_bytes
        return Promise(self.least_bytes - self.workspace_bytes, self.workspace_bytes, standing_bytes)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    model: ModelId
    num_bytes: int  #: to be loaded
    footprints: Mapping[str, Footprint]  #: by kind of device
    keep_alive_s: float  #: idle for longer, it is only retained
    is_pinned: bool = False
    weight: float = 1.0  #: how much a second of its start matters, in its reload cost
    digest: str = ""  #: another one means other bytes under the same name
