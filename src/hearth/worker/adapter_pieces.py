"""The memory of adapters on a worker's device, and the engines that compute with it. Loads nothing.

An engine learns of an adapter when its first request starts, and forgets it when the adapter is evicted,
unless running requests of a waiting model have it: then it makes no step until the adapter is loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hearth.core.types import AdapterId, ModelId
from hearth.engine.engine import Engine
from hearth.memory.pages import Mark
from hearth.memory.pool import PieceRun, Pool
from hearth.models.adapter import AdapterLayout
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.worker.failure import blaming


@dataclass(slots=True)
class AdapterPieces:
    """Mutable; the step thread alone calls it."""

    pool: Pool
    residency: AdapterResidency
    engines: Callable[[], Mapping[ModelId, Engine]]  #: of all models, including retired ones
    _runs: dict[AdapterId, Sequence[PieceRun]] = field(default_factory=dict)
    _pieces: dict[AdapterId, Sequence[torch.Tensor]] = field(default_factory=dict)
    _layouts: dict[AdapterId, AdapterLayout] = field(default_factory=dict)  #: of loaded ones
    #: By adapter whose last request has ended: a mark behind all steps that may read it.
    _last_reads: dict[AdapterId, Mark] = field(default_factory=dict)

    def __getitem__(self, adapter: AdapterId) -> Sequence[PieceRun]:
        return self._runs[adapter]

    def place(self, adapter: AdapterId, sizes: Sequence[int], spare_bytes: int) -> bool:
        """Give an adapter its memory; False: free memory but `spare_bytes` does not suffice."""
        runs = self.pool.pieces.place(adapter, sizes, spare_bytes)
        if runs is not None:
            self._runs[adapter] = runs
        return runs is not None

    def split(self, adapter: AdapterId) -> Sequence[torch.Tensor]:
        """Return the memory of each piece of an adapter; best called while it is being transferred."""
        if adapter not in self._pieces:
            self._pieces[adapter] = [piece for run in self._runs[adapter] for piece in run.split()]
        return self._pieces[adapter]

    def filled(self, adapter: AdapterId, layout: AdapterLayout) -> None:
        self._layouts[adapter] = layout
        # A request that lacked it may have ended before: its mark is ahead of the last copies.
        self._last_reads.pop(adapter, None)
        for model, engine in self.engines().items():
            if adapter in engine.adapters:
                with blaming(model):
                    engine.move_adapter(adapter, layout, self.split(adapter))

    def bind(self, adapter: AdapterId, model: ModelId, engine: Engine) -> None:
        self._last_reads.pop(adapter, None)
        if adapter not in engine.adapters:
            with blaming(model):
                engine.add_adapter(adapter, self._layouts[adapter], self.split(adapter))

    def rest(self, adapter: AdapterId) -> None:
        """No step queued from now on reads the adapter: the next owner waits only for steps before."""
        if adapter in self._runs and (mark := self.pool.pieces.mark()) is not None:
            self._last_reads[adapter] = mark

    def drop(self, adapter: AdapterId) -> int:
        """Free the memory of an adapter that no step uses; return how many bytes came free."""
        free_bytes = self.pool.free_bytes
        for model, engine in self.engines().items():
            if adapter in engine.adapters and not self.residency.is_run_by(adapter, model):
                with blaming(model):
                    engine.remove_adapter(adapter)
        self._layouts.pop(adapter, None)
        self._pieces.pop(adapter, None)
        del self._runs[adapter]
        self.pool.pieces.drop(adapter, self._last_reads.pop(adapter, None))
        self.residency.left(adapter)
        return self.pool.free_bytes - free_bytes
