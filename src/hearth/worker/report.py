"""Reports a worker's memory: all of it when asked, and whose weights are there when that changes.

Takes no memory and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from hearth.core.messages import DeviceResidency, ModelUse, Pong
from hearth.core.types import Hold, ModelId
from hearth.engine.assemble import prompt_kernel_of
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.cublas_workspace import capture_obstacle
from hearth.memory.pool import Holding
from hearth.system.garbage import LATE_COLLECTIONS
from hearth.worker.adapters import WorkerAdapters
from hearth.worker.hosted_model import HostedModel
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.torch_limit import TorchLimit
from hearth.worker.turns import Turns

#: How long a change may wait while steps are made.
INTERVAL_S = 0.1


class Reports:
    """Mutable; the step thread alone calls it."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        hosted: Mapping[ModelId, HostedModel],
        turns: Turns,
        adapters: WorkerAdapters,
        is_unstaged: Callable[[], bool],
        torch_limit: TorchLimit | None = None,
        *,
        lacks_kept_graphs: bool = False,
    ) -> None:
        """`hosted` are the hosted models, kept by whoever calls. `torch_limit`: None: torch has none.

        `is_unstaged`: loads have to pin host memory themselves. `lacks_kept_graphs`: snapshots have none.
        """
        self._reclaimer, self._hosted, self._turns, self._adapters = reclaimer, hosted, turns, adapters
        self._is_unstaged, self._torch_limit = is_unstaged, torch_limit
        self._lacks_kept_graphs = lacks_kept_graphs
        #: Models whose prompts another kernel than the fastest attends over; also those that are gone, for
        #: whoever counts them never counts back.
        self._slow_models: set[ModelId] = set()
        self._uncaptured_models: set[ModelId] = set()  #: whose steps are not replayed; likewise
        self._cramped_models: set[ModelId] = set()  #: whose products of eight bits lack scratch; likewise
        self.num_uncaptured_starts = 0  #: starts of models whose first steps could not be captured ahead
        self._told: dict[ModelId, int] = {}
        self._told_s = 0.0

    def residency(self, *, is_due: bool) -> DeviceResidency | None:
        """Return whose weights are there; None if that was told, or a report was made a moment ago."""
        now_s = time.monotonic()
        if not is_due and now_s < self._told_s + INTERVAL_S:
            return None
        self._told_s = now_s
        all_bytes = {one.model: self._there(one) for one in self._reclaimer.pool.usage().holdings}
        there = {model: num_bytes for model, num_bytes in all_bytes.items() if num_bytes}
        if there == self._told:
            return None
        self._told = there
        return DeviceResidency(there)

    def _there(self, holding: Holding) -> int:
        """Return the bytes, as stored, that are there: not what has its memory but is still to come."""
        hosted = self._hosted.get(holding.model)
        return hosted.there_bytes if hosted is not None and hosted.is_loading else holding.stored_bytes

    def pong(self, number: int) -> Pong:
        usage = self._reclaimer.pool.usage()
        self._slow_models |= {model for model, one in self._hosted.items() if _attends_slowly(one)}
        self._uncaptured_models |= {model for model, one in self._hosted.items() if _is_uncaptured(one)}
        self._cramped_models |= {model for model, one in self._hosted.items() if _has_little_scratch(one)}
        return Pong(
            number=number,
            budget_bytes=usage.budget_bytes,
            free_bytes=usage.free_bytes,
            workspace_bytes=usage.workspace_bytes,
            lost_bytes=usage.lost_bytes,
            moved_bytes=usage.moved_bytes,
            fallbacks={
                **usage.fallbacks,
                "late_collections": LATE_COLLECTIONS.num,
                "tables": self._reclaimer.num_spilled_tables,
                "kernels_compiled_while_serving": COMPILATIONS.num_while_serving,
                "kernels_loaded_while_serving": COMPILATIONS.num_loads_while_serving,
                "prompt_attention": len(self._slow_models),
                "eight_bit_products": len(self._cramped_models),
                "graphs": len(self._uncaptured_models),
                "first_steps_not_captured": self.num_uncaptured_starts,
                "staging": int(self._is_unstaged()),
                "graphs_not_restored": sum(map(_num_unrestored, self._hosted.values())),
                "snapshots_without_graphs": int(self._lacks_kept_graphs),
            },
            models=tuple(self._uses(usage.holdings)),
            torch_limit_bytes=None if self._torch_limit is None else self._torch_limit.num_bytes,
            is_torch_limit_measured=self._torch_limit is not None and self._torch_limit.is_measured,
            adapters=tuple(self._adapters.usages()),
            num_adapter_evictions=self._reclaimer.num_dropped_adapters,
        )

    def _uses(self, holdings: tuple[Holding, ...]) -> list[ModelUse]:
        by_model = {one.model: one for one in holdings}
        names = sorted({*by_model, *self._hosted})
        return [self._use(name, by_model.get(name) or Holding(name, 0, 0, 0, 0, 0, 0)) for name in names]

    def _use(self, model: ModelId, holding: Holding) -> ModelUse:
        hosted = self._hosted.get(model)
        num_bytes = (holding.weights_bytes, holding.total_bytes, holding.shared_bytes, holding.kv_bytes)
        if hosted is None:
            return ModelUse(model, Hold.RETAINED, False, *num_bytes)
        use = ModelUse(
            *(model, hosted.effective_hold, True, *num_bytes),
            num_waiting=len(hosted.waiting) + (0 if hosted.served is None else len(hosted.served.held)),
            coming_bytes=_coming_bytes(holding, hosted),
            is_in_turn=self._turns.is_in_turn(model),
            due_s=self._turns.next_due_in_s(model),
        )
        if (served := hosted.served) is None:
            return use
        usage, graphs = served.engine.usage, served.engine.runner.graphs
        return msgspec.structs.replace(
            use,
            num_running=usage.num_running,
            num_waiting=usage.num_waiting + use.num_waiting,
            kv_used_blocks=usage.kv_used_blocks,
            kv_cached_blocks=usage.kv_cached_blocks,
            kv_blocks=usage.kv_blocks,
            block_bytes=served.spec.shape.block_bytes,
            tables_bytes=holding.tables_bytes,
            num_captured_graphs=0 if graphs is None else len(graphs.captured),
            num_restored_graphs=0 if graphs is None else graphs.num_restored,
        )


def _num_unrestored(hosted: HostedModel) -> int:
    graphs = None if hosted.served is None else hosted.served.engine.runner.graphs
    return 0 if graphs is None else graphs.num_unrestored


def _attends_slowly(hosted: HostedModel) -> bool:
    """Return True if another kernel than the fastest attends over the model's prompts."""
    if (served := hosted.served) is None:
        return False
    return prompt_kernel_of(served.spec.model).slow_reason is not None


def _is_uncaptured(hosted: HostedModel) -> bool:
    """Return True if the model's steps are launched kernel by kernel, because they cannot be captured."""
    if (served := hosted.served) is None or served.engine.runner.kv.device.type != "cuda":
        return False
    return served.engine.runner.graphs is None and capture_obstacle(torch.__version__) is not None


def _has_little_scratch(hosted: HostedModel) -> bool:
    """Return True if the model's products of eight bits lack scratch to be as fast as they could."""
    return hosted.served is not None and hosted.served.engine.runner.decoder.sharing_obstacle() is not None


def _coming_bytes(holding: Holding, hosted: HostedModel) -> int:
    """Return the bytes of weights, as served, that a load under way still has to bring."""
    if not hosted.is_loading or not holding.stored_bytes:
        return 0
    there_bytes = holding.weights_bytes * hosted.there_bytes // holding.stored_bytes
    return max(0, holding.weights_bytes - there_bytes)
