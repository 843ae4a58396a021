"""The source that a model is converted from: architecture, tensors, tokenizer's files. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hearth.models.arch import Arch
from hearth.models.pack import Checkpoint


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A source whose tensors can be read while the context that yielded it lasts."""

    arch: Arch
    checkpoint: Checkpoint
    text_files: Callable[[], Mapping[str, bytes]]  #: by file name, as `text/` reads them
