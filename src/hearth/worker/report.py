"""What a worker says of its memory: a picture when asked, and whose weights are there when that changes.

Takes no memory and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from hearth.memory.pool import Holding, Pool
from hearth.messages import DeviceResidency, ModelUse, Pong
from hearth.types import Hold, ModelId
from hearth.worker.hosted_model import HostedModel

#: How long a change may wait while steps are made.
INTERVAL_S = 0.1


class Reports:
    """Mutable; the step thread alone calls it."""

    def __init__(self, pool: Pool, hosts: Mapping[ModelId, HostedModel]) -> None:
        """`hosts` are the hosted models, kept by whoever calls."""
        self._pool, self._hosts = pool, hosts
        self._told: dict[ModelId, int] = {}
        self._told_s = 0.0

    def residency(self, *, is_due: bool) -> DeviceResidency | None:
        """None: it is as it was told, or was told a moment ago and is not due."""
        now_s = time.monotonic()
        if not is_due and now_s < self._told_s + INTERVAL_S:
            return None
        self._told_s = now_s
        all_bytes = {one.model: self._there(one) for one in self._pool.picture().holdings}
        there = {model: num_bytes for model, num_bytes in all_bytes.items() if num_bytes}
        if there == self._told:
            return None
        self._told = there
        return DeviceResidency(there)

    def _there(self, holding: Holding) -> int:
        """Bytes as stored; what is still on its way has its memory already, but does not count."""
        host = self._hosts.get(holding.model)
        return host.reused_bytes if host is not None and host.is_settling else holding.stored_bytes

    def pong(self, number: int) -> Pong:
        picture = self._pool.picture()
        return Pong(
            number=number,
            budget_bytes=picture.budget_bytes,
            free_bytes=picture.free_bytes,
            workspace_bytes=picture.workspace_bytes,
            lost_bytes=picture.lost_bytes,
            moved_bytes=picture.moved_bytes,
            fallbacks=dict(picture.fallbacks),
            models=tuple(self._uses(picture.holdings)),
        )

    def _uses(self, holdings: tuple[Holding, ...]) -> list[ModelUse]:
        by_model = {one.model: one for one in holdings}
        names = sorted({*by_model, *self._hosts})
        return [self._use(name, by_model.get(name) or Holding(name, 0, 0, 0, 0, 0)) for name in names]

    def _use(self, model: ModelId, holding: Holding) -> ModelUse:
        host = self._hosts.get(model)
        num_bytes = (holding.weights_bytes, holding.total_bytes, holding.shared_bytes, holding.kv_bytes)
        if host is None:
            return ModelUse(model, Hold.RETAINED, False, *num_bytes)
        hold = host.regarded
        coming_bytes = self._coming_bytes(holding, host)
        if host.engine is None:
            waiting = len(host.waiting)
            return ModelUse(model, hold, True, *num_bytes, num_waiting=waiting, coming_bytes=coming_bytes)
        use = host.engine.usage
        return ModelUse(
            *(model, hold, True, *num_bytes, use.num_running, use.num_waiting),
            *(use.kv_used_blocks, use.kv_cached_blocks, use.kv_blocks),
            block_bytes=0 if host.plan is None else host.plan.shape.block_bytes,
            coming_bytes=coming_bytes,
        )

    def _coming_bytes(self, holding: Holding, host: HostedModel) -> int:
        """Of weights as served: all but what was there when it was settled, until that has ended."""
        if not host.is_settling or not holding.stored_bytes:
            return 0
        there_bytes = holding.weights_bytes * host.reused_bytes // holding.stored_bytes
        return max(0, holding.weights_bytes - there_bytes)
