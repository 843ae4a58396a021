"""What a model is converted from: an architecture, tensors, the files of its tokenizer. Reads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hearth.models.arch import Arch
from hearth.models.pack import Checkpoint


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Open: its tensors can be read while the context that yielded it lasts."""

    arch: Arch
    checkpoint: Checkpoint
    text_files: Callable[[], Mapping[str, bytes]]  #: by file name, as `text/` reads them
