"""A request that is tokenised, checked and charged, but not started."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.control.deploy.catalog import CatalogEntry
from hearth.control.keys.key_admission import KeyAdmission
from hearth.control.requests.generation import GenerationRequest
from hearth.core.types import Pace
from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    wanted: GenerationRequest
    admission: KeyAdmission
    entry: CatalogEntry
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    pace: Pace
    arrived_s: float  #: on the clock of the event loop
    arrived_at_s: float  #: since the epoch
