"""Which rows of a step have which adapter, at fixed device addresses. Chooses nothing, multiplies nothing.

The lists lie in one packed array (`PackedAdapters`), written on the host and sent only where a step differs
from the last that had adapters: as long as the same requests decode, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hearth.engine.adapter_table import AdapterTable
from hearth.engine.step_shape import StepShape
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows, cut_adapter_tiles
from hearth.kernels.host_read import read_host
from hearth.policy.batch.plan import StepPlan
from hearth.sizes import (
    ADAPTER_PROMPT_TILE_ROWS,
    ADAPTER_TILE_FIELDS,
    ADAPTER_TILE_ROWS,
    PackedAdapters,
)
from hearth.types import AdapterId


class AdapterInputs:
    """The device buffers of a step's adapters. Mutable; written only by the runner, in step order."""

    def __init__(self, packed: torch.Tensor, max_seqs: int) -> None:
        self._packed, self._max_seqs = packed, max_seqs
        is_cuda = packed.is_cuda
        hosts = [torch.zeros_like(packed, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        self._hosts = [(host, host.numpy()) for host in hosts]
        #: Of the step that was sent last: by row of logits, and by row.
        self._logit_groups: tuple[AdapterGroup, ...] = ()
        self._groups: tuple[AdapterGroup, ...] = ()
        #: The adapters of decode rows alone that were sent last; None: something else was.
        self._sent: Sequence[AdapterId | None] | None = None

    def forget(self) -> None:
        """Send the next step whatever it is, for an adapter has another place."""
        self._sent = None

    def park(self) -> None:
        """Send a step in which no row has an adapter."""
        self._send((), (), shape=None)

    def fill(self, plan: StepPlan, shape: StepShape, table: AdapterTable) -> None:
        """Send the adapters of a plan. The step before the last must be done, as for the other inputs."""
        decode = plan.decode.adapters
        if not plan.prompts and decode is self._sent:
            return
        adapters = [*(decode or [None] * len(plan.decode)), *(row.adapter for row in plan.prompts)]
        by_row = _by_adapter(enumerate(adapters))
        logit_groups = [_group(table, one, np.array(rows, np.int64)) for one, rows in by_row.items()]
        if not plan.prompts:
            self._send(logit_groups, logit_groups, shape=None)
            self._sent = decode
            return
        begins = np.cumsum([0, *(row.num_tokens for row in plan.prompts)]) + len(plan.decode)
        spans = [*range(len(plan.decode)), *begins.tolist()]
        groups = [
            _group(table, one, np.concatenate([np.arange(spans[row], spans[row + 1]) for row in rows]))
            for one, rows in by_row.items()
        ]
        self._send(logit_groups, groups, shape)

    def rows(self, shape: StepShape) -> AdapterRows:
        """Return the adapters of all rows of the step that was sent last."""
        if not shape.has_prompts:
            return self.logit_rows(shape)
        parts = PackedAdapters.of(shape.num_rows, self._max_seqs)
        tiles = self._packed[parts.tiles].view(-1, ADAPTER_TILE_FIELDS)
        count = self._packed[parts.counts][1:]
        return AdapterRows(self._groups, self._packed[parts.order], tiles, count, ADAPTER_PROMPT_TILE_ROWS)

    def logit_rows(self, shape: StepShape) -> AdapterRows:
        """Return the adapters of those rows alone whose logits are wanted."""
        parts, num_rows = PackedAdapters.of(shape.num_rows, self._max_seqs), shape.num_logits
        order = self._packed[parts.logit_order][:num_rows]
        tiles = self._packed[parts.logit_tiles].view(-1, ADAPTER_TILE_FIELDS)[:num_rows]
        count = self._packed[parts.counts][:1]
        return AdapterRows(self._logit_groups, order, tiles, count, ADAPTER_TILE_ROWS)

    def _send(
        self,
        logit_groups: Sequence[AdapterGroup],
        groups: Sequence[AdapterGroup],
        shape: StepShape | None,
    ) -> None:
        """Send the lists; None: without prompts, so that rows of logits are all rows."""
        self._logit_groups, self._groups, self._sent = tuple(logit_groups), tuple(groups), None
        self._hosts.reverse()
        host, packed = self._hosts[0]
        parts = PackedAdapters.of(1 if shape is None else shape.num_rows, self._max_seqs)
        num_words = parts.order.start
        num_logit_tiles = _write(
            packed[parts.logit_order], packed[parts.logit_tiles], logit_groups, ADAPTER_TILE_ROWS
        )
        num_tiles = 0
        if shape is not None:
            num_tiles = _write(packed[parts.order], packed[parts.tiles], groups, ADAPTER_PROMPT_TILE_ROWS)
            num_words = parts.tiles.start + ADAPTER_TILE_FIELDS * num_tiles
        packed[parts.counts] = num_logit_tiles, num_tiles
        read_host(self._packed, host, num_words)


def _by_adapter(rows: Iterable[tuple[int, AdapterId | None]]) -> dict[AdapterId, list[int]]:
    found: dict[AdapterId, list[int]] = {}
    for row, adapter in rows:
        if adapter is not None:
            found.setdefault(adapter, []).append(row)
    return found


def _group(table: AdapterTable, adapter: AdapterId, rows: npt.NDArray[np.int64]) -> AdapterGroup:
    bound = table[adapter]
    return AdapterGroup(bound.factors, bound.table.data_ptr(), rows)


def _write(
    order: npt.NDArray[np.int64],
    tiles: npt.NDArray[np.int64],
    groups: Sequence[AdapterGroup],
    tile_rows: int,
) -> int:
    """Write the lists of groups, and return how many tiles there are."""
    rows, fields = cut_adapter_tiles(groups, tile_rows)
    order[: len(rows)], tiles[: len(fields)] = rows, fields
    return len(fields) // ADAPTER_TILE_FIELDS
