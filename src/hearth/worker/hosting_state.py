"""The states of a model on a worker, each with what a model has in it. Changes no state.

Finding      a thread has the keeper open the model
Found        its size is known, and it has no memory yet
Assembling   it has its memory; a thread starts its transfer and assembles its engine
Loading      it has its engine, and some of its bytes are missing. When the last ones are about to arrive, a
             step may follow them layer by layer. That blocks the step thread for some milliseconds, so it is
             done only while no other model has a step to make
Loaded       all of it is on the device. While it has no requests, its tail may be evicted
Incomplete   it was: what is missing is loaded for the next request
Retired      it is promised no memory; where addresses last, its engine is kept for its return
Closed       nothing of it is left

Adapters take the same ladder, without engine and tail: `AdapterState` (`policy/memory/adapter_residency.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hearth.core.types import SamplingTable
from hearth.engine.engine import Engine
from hearth.models.weights import TensorPlace, bind
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.model_load import ModelLoad


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model with its engine, which has its requests. Mutable; written by the step thread."""

    spec: HostingSpec
    engine: Engine
    #: Bytes of the tables that lie in the pool; written by the `Reclaimer`.
    pooled_tables: dict[SamplingTable, int] = field(default_factory=dict)

    def rebind(self, places: Mapping[str, TensorPlace], workspace: torch.Tensor | None = None) -> None:
        model = self.spec.model
        self.engine.runner.rebind(bind(model.arch, self.spec.layout, places, model.layers), workspace)


@dataclass(frozen=True, slots=True)
class Finding:
    began_s: float


@dataclass(frozen=True, slots=True)
class Found:
    spec: HostingSpec
    open_s: float  #: how long it took to find


@dataclass(frozen=True, slots=True)
class Assembling:
    spec: HostingSpec
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class Loading:
    served: ServedModel
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class Loaded:
    served: ServedModel


@dataclass(frozen=True, slots=True)
class Incomplete:
    served: ServedModel


@dataclass(frozen=True, slots=True)
class Retired:
    served: ServedModel


@dataclass(frozen=True, slots=True)
class Closed:
    pass


HostingState = Finding | Found | Assembling | Loading | Loaded | Incomplete | Retired | Closed
