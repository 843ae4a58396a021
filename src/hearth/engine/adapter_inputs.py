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
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows, cut_adapter_shares
from hearth.kernels.host_read import read_host
from hearth.policy.batch.plan import StepPlan
from hearth.sizes import (
    ADAPTER_PROJECTIONS,
    ADAPTER_PROMPT_TILE_ROWS,
    ADAPTER_SHARE_FIELDS,
    ADAPTER_TILE_ROWS,
    PackedAdapters,
    adapter_shares,
)
from hearth.types import AdapterId


class AdapterInputs:
    """The device buffers of a step's adapters. Mutable; written only by the runner, in step order."""

    def __init__(self, packed: torch.Tensor, max_seqs: int) -> None:
        """Take `packed` as `input_buffers` has it, filled as by `EngineTables`."""
        self._packed, self._max_seqs = packed, max_seqs
        #: Where steps are written in turn. None of them: no step had an adapter yet, and most never have.
        self._hosts: list[tuple[torch.Tensor, npt.NDArray[np.int64]]] = []
        #: Of the step that was sent last: by row of logits, and by row.
        self._logit_groups: tuple[AdapterGroup, ...] = ()
        self._groups: tuple[AdapterGroup, ...] = ()
        #: The adapters of decode rows alone that were sent last; None: something else was.
        self._sent: Sequence[AdapterId | None] | None = None

    @property
    def is_used(self) -> bool:
        """True if a step was ever sent."""
        return bool(self._hosts)

    def forget(self) -> None:
        """Send the next step whatever it is, for an adapter has another place, or the lists are gone."""
        self._sent = None

    def park(self, shape: StepShape) -> None:
        """Send a step in which no row has an adapter: those of the step before may be gone."""
        self._send((), (), shape if shape.has_prompts else None)

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
        shares = _by_projection(self._packed[parts.shares])
        return AdapterRows(self._groups, self._packed[parts.order], shares, ADAPTER_PROMPT_TILE_ROWS)

    def logit_rows(self, shape: StepShape) -> AdapterRows:
        """Return the adapters of those rows alone whose logits are wanted."""
        parts, num_rows = PackedAdapters.of(shape.num_rows, self._max_seqs), shape.num_logits
        order = self._packed[parts.logit_order][:num_rows]
        shares = _by_projection(self._packed[parts.logit_shares])[:, : adapter_shares(num_rows)]
        return AdapterRows(self._logit_groups, order, shares, ADAPTER_TILE_ROWS)

    def _send(
        self,
        logit_groups: Sequence[AdapterGroup],
        groups: Sequence[AdapterGroup],
        shape: StepShape | None,
    ) -> None:
        """Send the lists; None: without prompts, so that rows of logits are all rows."""
        self._logit_groups, self._groups, self._sent = tuple(logit_groups), tuple(groups), None
        self._hosts = self._hosts[::-1] or _hosts_for(self._packed)
        host, packed = self._hosts[0]
        parts = PackedAdapters.of(1 if shape is None else shape.num_rows, self._max_seqs)
        _write(packed[parts.logit_order], packed[parts.logit_shares], logit_groups, ADAPTER_TILE_ROWS)
        if shape is not None:
            _write(packed[parts.order], packed[parts.shares], groups, ADAPTER_PROMPT_TILE_ROWS)
        read_host(self._packed, host, parts.order.start if shape is None else parts.shares.stop)


def _hosts_for(packed: torch.Tensor) -> list[tuple[torch.Tensor, npt.NDArray[np.int64]]]:
    """Return memory of the host for two steps, each with the array that writes it."""
    hosts = [torch.zeros_like(packed, device="cpu", pin_memory=packed.is_cuda) for _ in range(2)]
    return [(host, host.numpy()) for host in hosts]


def _by_adapter(rows: Iterable[tuple[int, AdapterId | None]]) -> dict[AdapterId, list[int]]:
    found: dict[AdapterId, list[int]] = {}
    for row, adapter in rows:
        if adapter is not None:
            found.setdefault(adapter, []).append(row)
    return found


def _group(table: AdapterTable, adapter: AdapterId, rows: npt.NDArray[np.int64]) -> AdapterGroup:
    bound = table[adapter]
    return AdapterGroup(bound.factors, bound.table.data_ptr(), rows, bound.weights)


def _write(
    order: npt.NDArray[np.int64],
    shares: npt.NDArray[np.int64],
    groups: Sequence[AdapterGroup],
    tile_rows: int,
) -> None:
    """Write the lists of groups."""
    begin = 0
    for group in groups:
        order[begin : begin + len(group.rows)] = group.rows
        begin += len(group.rows)
    found = cut_adapter_shares(groups, tile_rows)
    places = shares.reshape(ADAPTER_PROJECTIONS, -1, ADAPTER_SHARE_FIELDS)
    num_shares = found.shape[1]
    places[:, :num_shares], places[:, num_shares:] = found, 0


def _by_projection(shares: torch.Tensor) -> torch.Tensor:
    return shares.view(ADAPTER_PROJECTIONS, -1, ADAPTER_SHARE_FIELDS)
