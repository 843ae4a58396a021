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
        self._memory, self._ropes, self._sink = memory, arch.ropes, sink
        tables = views(table_buffers(arch.dimensions, limits, context), memory)
        self.inputs = _part(tables, "inputs.")
        self.sampler = _part(tables, "sampler.")
        self.counters = tables["attention.counters"]
        #: One table for each of the model's ropes.
        self.cos_sin = tables["rotary.cos_sin"] if arch.ropes else None

    def fill(self) -> None:
        """Queue what the first step expects: zeros, block tables of the sink, cosines and sines."""
        self._memory.zero_()
        self.inputs["block_table"].fill_(self._sink)
        if self.cos_sin is not None:
            for rope, table in zip(self._ropes, self.cos_sin, strict=True):
                write_cos_sin(rope, table)


def _part(tables: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
