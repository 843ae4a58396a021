"""Models and adapters that the service offers, as the registry keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.core.sizes import Dimensions
from hearth.core.types import AdapterId
from hearth.policy.fleet.footprint import Facts


@dataclass(frozen=True, slots=True)
class ModelLocation:
    where: str  #: the directory or URL that it is loaded from
    directory: str  #: where its manifest and its tokenizer lie: `where`, or the local copy of a URL's


@dataclass(frozen=True, slots=True)
class Deployed:
    name: str
    source: str  #: what it was deployed from
    where: str  #: this and the next as in `ModelLocation`
    directory: str
    digest: str  #: of the manifest
    facts: Facts
    created_at_s: float  #: since the epoch
    labels: tuple[str, ...] = ()  #: that nodes must have to run it, beside those of its settings

    @property
    def location(self) -> ModelLocation:
        return ModelLocation(self.where, self.directory)


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    num_bytes: int
    num_parameters: int
    dtype: str  #: that its base is computed in
    max_rank: int
    targets: tuple[str, ...]  #: the projections that it changes somewhere, of `models/adapter.py`
    dimensions: Dimensions  #: of the base that it was made for


@dataclass(frozen=True, slots=True)
class DeployedAdapter:
    name: str
    base: str  #: the name of the model that it changes
    source: str  #: this and the next as in `Deployed`
    where: str
    directory: str
    digest: str
    facts: AdapterFacts
    created_at_s: float

    @property
    def adapter_id(self) -> AdapterId:
        return AdapterId(self.digest)

    @property
    def num_bytes(self) -> int:
        return self.facts.num_bytes

    def fits(self, base: Facts) -> bool:
        facts = self.facts
        return facts.dimensions == base.dimensions and facts.dtype in (base.dtype, "float32")

    @property
    def location(self) -> ModelLocation:
        return ModelLocation(self.where, self.directory)
