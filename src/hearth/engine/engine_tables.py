"""Buffers of an engine that keep their content between steps, as views of memory that the caller owns.

Captured steps refer to them, so their addresses never change.
"""

from __future__ import annotations

import torch

from hearth.core.sizes import StepLimits, table_buffers
from hearth.models.arch import Arch
from hearth.models.buffers import views
from hearth.models.rope import write_cos_sin


class EngineTables:
    """Views by the names of `table_buffers`. Others write them, after `fill`."""

    def __init__(self, arch: Arch, limits: StepLimits, context: int, sink: int, memory: torch.Tensor) -> None:
        """View `memory` (uint8), which is not touched. `sink`: a block that is never read."""
        self._memory, self._rope, self._sink = memory, arch.rope, sink
        tables = views(table_buffers(arch.dimensions, limits, context), memory)
        self.inputs = _part(tables, "inputs.")
        self.sampler = _part(tables, "sampler.")
        self.counters = tables["attention.counters"]
        self.cos_sin = None if arch.rope is None else tables["rotary.cos_sin"]

    def fill(self) -> None:
        """Queue what the first step expects: zeros, block tables of the sink, cosines and sines."""
        self._memory.zero_()
        self.inputs["block_table"].fill_(self._sink)
        if self._rope is not None and self.cos_sin is not None:
            write_cos_sin(self._rope, self.cos_sin)


def _part(tables: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
