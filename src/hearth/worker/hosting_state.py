"""The states of a model on a worker, each with what a model has in it. Changes no state.

Finding      a thread has the keeper look the model up
Found        what it takes is known, and it has no memory yet
Assembling   it has its memory; a thread puts its engine together, and starts to load its bytes
Loading      it has its engine, and some of its bytes are missing. Once the last ones should be there soon
             a step may follow them layer by layer, which holds up the step thread for some milliseconds,
             so it is made only while no other model has one to make
Loaded       all of it is there. While it has no requests others may take from its tail
Incomplete   that has happened: what is missing is loaded for the next request
Retired      it is promised nothing; where addresses last, its engine waits for the model to come back
Closed       nothing of it is left
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
        """Compute with tensors that are elsewhere now, and in another workspace."""
        self.engine.runner.rebind(bind(self.spec.model.arch, self.spec.layout, places), workspace)


@dataclass(frozen=True, slots=True)
class Finding:
    """The keeper is asked for the model."""

    began_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """The model is known and has no memory yet."""

    spec: HostingSpec
    open_s: float  #: how long it took to find


@dataclass(frozen=True, slots=True)
class Assembling:
    """The model has its memory and no engine yet."""

    spec: HostingSpec
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class Loading:
    """The model has its engine; some of its bytes, or their mapping, are still to come."""

    served: ServedModel
    load: ModelLoad


@dataclass(frozen=True, slots=True)
class Loaded:
    """All of the model is there."""

    served: ServedModel


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The model has its memory, but others took from its weights."""

    served: ServedModel


@dataclass(frozen=True, slots=True)
class Retired:
    """The model has its engine, and perhaps weights, but no other memory."""

    served: ServedModel


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing of the model is left."""


HostingState = Finding | Found | Assembling | Loading | Loaded | Incomplete | Retired | Closed
