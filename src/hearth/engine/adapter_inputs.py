"""Which rows of a step have which adapter: lists in one packed array, sent only if they have changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import (
    ADAPTER_PROJECTIONS,
    ADAPTER_PROMPT_TILE_ROWS,
    ADAPTER_SHARE_FIELDS,
    ADAPTER_TILE_ROWS,
    PackedAdapters,
    adapter_shares,
)
from hearth.core.types import AdapterId
from hearth.engine.adapter_table import AdapterTable, BoundAdapter
from hearth.engine.step_shape import StepShape
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows, cut_adapter_shares
from hearth.kernels.host_read import read_host
from hearth.kernels.jit import runs_triton
from hearth.policy.batch.plan import StepPlan


class AdapterInputs:
    """The device buffers of a step's adapters. Mutable; written by the runner alone, in step order."""

    def __init__(self, packed: torch.Tensor, max_seqs: int) -> None:
        self._packed, self._max_seqs = packed, max_seqs
        self._hosts: list[tuple[torch.Tensor, npt.NDArray[np.int64]]] = []
        #: Of the last step: by row of logits, and by row. Empty where kernels read the lists.
        self._logit_groups: tuple[AdapterGroup, ...] = ()
        self._groups: tuple[AdapterGroup, ...] = ()
        #: The adapters of the last step, if it had decode rows alone; else None.
        self._sent: Sequence[AdapterId | None] | None = None

    @property
    def is_used(self) -> bool:
        return bool(self._hosts)

    def forget(self) -> None:
        """Send the next step in any case: an adapter has moved, or the lists are gone."""
        self._sent = None

    def fill_padding(self, shape: StepShape) -> None:
        """Send a step in which no row has an adapter: earlier ones may be gone."""
        none = _Groups.of(np.empty(0, np.int64), ())
        self._send(none, none if shape.has_prompts else None, shape if shape.has_prompts else None)

    def fill(self, plan: StepPlan, shape: StepShape, table: AdapterTable) -> None:
        """Send the adapters of a plan. The step before the last must be done."""
        decode = plan.decode.adapters
        if not plan.prompts and decode is self._sent:
            return
        adapters = [*(decode or [None] * len(plan.decode)), *(row.adapter for row in plan.prompts)]
        chosen, numbers = _numbered(adapters)
        own = [table[one] for one in chosen]
        if not plan.prompts:
            self._send(_Groups.of(numbers, own), None, None)
            self._sent = decode
            return
        lengths = [*[1] * len(plan.decode), *(row.num_tokens for row in plan.prompts)]
        self._send(_Groups.of(numbers, own), _Groups.of(np.repeat(numbers, lengths), own), shape)

    def rows(self, shape: StepShape) -> AdapterRows:
        if not shape.has_prompts:
            return self.logit_rows(shape)
        parts = PackedAdapters.of(shape.num_rows, self._max_seqs)
        shares = _by_projection(self._packed[parts.shares])
        return AdapterRows(self._groups, self._packed[parts.order], shares, ADAPTER_PROMPT_TILE_ROWS)

    def logit_rows(self, shape: StepShape) -> AdapterRows:
        parts, num_rows = PackedAdapters.of(shape.num_rows, self._max_seqs), shape.num_logits
        order = self._packed[parts.logit_order][:num_rows]
        shares = _by_projection(self._packed[parts.logit_shares])[:, : adapter_shares(num_rows)]
        return AdapterRows(self._logit_groups, order, shares, ADAPTER_TILE_ROWS)

    def _send(self, logits: _Groups, rows: _Groups | None, shape: StepShape | None) -> None:
        """Send the lists of logit rows and of all rows; None: without prompts one list serves both."""
        if not runs_triton(self._packed):
            self._logit_groups = logits.for_reference()
            self._groups = self._logit_groups if rows is None else rows.for_reference()
        self._sent = None
        self._hosts = self._hosts[::-1] or _hosts_for(self._packed)
        host, packed = self._hosts[0]
        parts = PackedAdapters.of(1 if shape is None else shape.num_rows, self._max_seqs)
        logits.write(packed[parts.logit_order], packed[parts.logit_shares], ADAPTER_TILE_ROWS)
        if rows is not None:
            rows.write(packed[parts.order], packed[parts.shares], ADAPTER_PROMPT_TILE_ROWS)
        read_host(self._packed, host, parts.order.start if rows is None else parts.shares.stop)


def _hosts_for(packed: torch.Tensor) -> list[tuple[torch.Tensor, npt.NDArray[np.int64]]]:
    hosts = [torch.zeros_like(packed, device="cpu", pin_memory=packed.is_cuda) for _ in range(2)]
    return [(host, host.numpy()) for host in hosts]


@dataclass(frozen=True, slots=True)
class _Groups:
    adapters: Sequence[BoundAdapter]
    order: npt.NDArray[np.int64]  #: rows of the first adapter, then of the second, ...
    counts: npt.NDArray[np.int64]  #: rows per adapter

    @staticmethod
    def of(numbers: npt.NDArray[np.int64], adapters: Sequence[BoundAdapter]) -> _Groups:
        order = np.argsort(numbers, kind="stable")
        return _Groups(
            adapters,
            order[np.count_nonzero(numbers < 0) :],
            np.bincount(numbers[numbers >= 0], minlength=len(adapters)),
        )

    def for_reference(self) -> tuple[AdapterGroup, ...]:
        ends = self.counts.cumsum().tolist()
        return tuple(
            AdapterGroup(
                one.factors, one.address, self.order[end - count : end], one.weights, one.row_weights
            )
            for one, count, end in zip(self.adapters, self.counts.tolist(), ends, strict=True)
        )

    def write(self, order: npt.NDArray[np.int64], shares: npt.NDArray[np.int64], tile_rows: int) -> None:
        order[: len(self.order)] = self.order
        addresses = np.array([one.address for one in self.adapters], np.int64)
        weights = np.array([(one.weights, one.row_weights) for one in self.adapters], np.int64)
        found = cut_adapter_shares(
            self.counts, addresses, weights.reshape(-1, 2, ADAPTER_PROJECTIONS), tile_rows
        )
        places = shares.reshape(ADAPTER_PROJECTIONS, -1, ADAPTER_SHARE_FIELDS)
        num_shares = found.shape[1]
        places[:, :num_shares], places[:, num_shares:] = found, 0


def _numbered(
    adapters: Sequence[AdapterId | None],
) -> tuple[Collection[AdapterId], npt.NDArray[np.int64]]:
    """Return the adapters of all rows, each once, and each row's index into them; -1: none."""
    chosen: dict[AdapterId, int] = {}
    numbers = [-1 if one is None else chosen.setdefault(one, len(chosen)) for one in adapters]
    return chosen.keys(), np.array(numbers, np.int64)


def _by_projection(shares: torch.Tensor) -> torch.Tensor:
    return shares.view(ADAPTER_PROJECTIONS, -1, ADAPTER_SHARE_FIELDS)
