"""Reports a worker's memory: all of it on a ping, and which weights are on the device when that changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec
import torch

from hearth.core.messages import DeviceResidency, ModelUse, PipelineUse, Pong
from hearth.core.types import Hold, ModelId
from hearth.engine.assemble import prompt_kernel_of
from hearth.engine.runner import Runner
from hearth.kernels import packed_products
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.cublas_workspace import capture_obstacle
from hearth.memory.pool import Holding
from hearth.system.garbage import LATE_COLLECTIONS
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import ServedModel
from hearth.worker.runtime import HostingResources
from hearth.worker.stage_member import StageMember

#: How long a change may wait while steps run.
INTERVAL_S = 0.1


class Reports:
    """Mutable; the step thread alone calls it."""

    def __init__(self, models: HostedModels, resources: HostingResources) -> None:
        self._models, self._resources = models, resources
        #: By fallback: the models that ever took it. Models that are gone stay in: these are counters.
        self._fallback_models: dict[str, set[ModelId]] = {name: set() for name in _MODEL_FALLBACKS}
        self.num_uncaptured_starts = 0  #: model starts without captured first steps
        self._sent: dict[ModelId, int] = {}
        self._sent_s = 0.0

    def residency(self, *, is_due: bool) -> DeviceResidency | None:
        """Return which weights are on the device; None: unchanged, or reported a moment ago."""
        now_s = time.monotonic()
        if not is_due and now_s < self._sent_s + INTERVAL_S:
            return None
        self._sent_s = now_s
        all_bytes = {
            one.model: self._loaded_bytes(one) for one in self._models.reclaimer.pool.usage().holdings
        }
        there = {model: num_bytes for model, num_bytes in all_bytes.items() if num_bytes}
        if there == self._sent:
            return None
        self._sent = there
        return DeviceResidency(there)

    def _loaded_bytes(self, holding: Holding) -> int:
        hosted = self._models.hosted.get(holding.model)
        return hosted.loaded_bytes if hosted is not None and hosted.is_loading else holding.stored_bytes

    def pong(self, number: int) -> Pong:
        usage = self._models.reclaimer.pool.usage()
        served = {model: one.served for model, one in self._models.hosted.items() if one.served is not None}
        for name, is_taken in _MODEL_FALLBACKS.items():
            self._fallback_models[name] |= {model for model, one in served.items() if is_taken(one)}
        graphs = [one.engine.runner.layers.graphs for one in served.values()]
        snapshots, torch_limit = self._resources.snapshots, self._resources.torch_limit
        return Pong(
            number=number,
            budget_bytes=usage.budget_bytes,
            free_bytes=usage.free_bytes,
            workspace_bytes=usage.workspace_bytes,
            lost_bytes=usage.lost_bytes,
            moved_bytes=usage.moved_bytes,
            fallbacks={
                **usage.fallbacks,
                **{name: len(models) for name, models in self._fallback_models.items()},
                "packed_products": int(packed_products.is_missing()),
                "late_collections": LATE_COLLECTIONS.num,
                "tables": self._models.reclaimer.num_spilled_tables,
                "kernels_compiled_while_serving": COMPILATIONS.num_while_serving,
                "kernels_loaded_while_serving": COMPILATIONS.num_loads_while_serving,
                "first_steps_not_captured": self.num_uncaptured_starts,
                "stage_frames_dropped": self._num_dropped_frames(),
                "stage_memory": sum(one.lacks_device_memory for one in self._members()),
                "staging": int(self._resources.lease_client.is_unstaged),
                "graphs_not_restored": sum(one.num_unrestored for one in graphs if one is not None),
                "snapshots_without_graphs": int(snapshots is not None and snapshots.lacks_graphs),
            },
            models=tuple(self._uses(usage.holdings)),
            torch_limit_bytes=None if torch_limit is None else torch_limit.num_bytes,
            is_torch_limit_measured=torch_limit is not None and torch_limit.is_measured,
            adapters=tuple(self._models.adapters.usages()),
            num_adapter_evictions=self._models.reclaimer.num_dropped_adapters,
        )

    def _num_dropped_frames(self) -> int:
        connections = self._resources.connections
        past = 0 if connections is None else connections.num_dropped
        return past + sum(one.num_dropped for one in self._members())

    def _members(self) -> list[StageMember]:
        return [one.member for one in self._models.hosted.values() if one.member is not None]

    def _uses(self, holdings: tuple[Holding, ...]) -> list[ModelUse]:
        by_model = {one.model: one for one in holdings}
        names = sorted({*by_model, *self._models.hosted})
        return [self._use(name, by_model.get(name) or Holding(name, 0, 0, 0, 0, 0, 0)) for name in names]

    def _use(self, model: ModelId, holding: Holding) -> ModelUse:
        hosted = self._models.hosted.get(model)
        use = ModelUse(
            model,
            Hold.RETAINED,
            is_hosted=False,
            weights_bytes=holding.weights_bytes,
            total_bytes=holding.total_bytes,
            shared_bytes=holding.shared_bytes,
            kv_bytes=holding.kv_bytes,
        )
        if hosted is None:
            return use
        use = msgspec.structs.replace(
            use,
            hold=hosted.effective_hold,
            is_hosted=True,
            num_waiting=sum(map(len, (hosted.pending.queued, hosted.pending.arriving, hosted.pending.held))),
            coming_bytes=_coming_bytes(holding, hosted),
            is_in_turn=self._models.turns.is_in_turn(model),
            due_s=self._models.turns.due_in_s(model),
        )
        if (served := hosted.served) is None:
            return use
        usage, graphs = served.engine.usage, served.engine.runner.layers.graphs
        return msgspec.structs.replace(
            use,
            num_running=usage.num_running,
            num_waiting=usage.num_waiting + use.num_waiting,
            # The first stage alone knows which of its blocks requests hold.
            kv_used_blocks=0 if hosted.later_stage is not None else usage.kv_used_blocks,
            kv_cached_blocks=usage.kv_cached_blocks,
            kv_blocks=usage.kv_blocks,
            block_bytes=served.spec.shape.block_bytes,
            tables_bytes=holding.tables_bytes,
            num_captured_graphs=0 if graphs is None else len(graphs.captured),
            num_restored_graphs=0 if graphs is None else graphs.num_restored,
            pipeline=_pipeline_use(served.engine.runner),
        )


def _pipeline_use(runner: Runner) -> PipelineUse | None:
    num_flights, times = runner.num_flights, runner.stage_times
    if num_flights is None:
        return None
    if times is None:
        return PipelineUse(num_flights)
    return PipelineUse(num_flights, tuple(times.stage_s), times.hops_s)


def _is_uncaptured(served: ServedModel) -> bool:
    layers = served.engine.runner.layers
    return layers.kv.is_cuda and layers.graphs is None and capture_obstacle(torch.__version__) is not None


_MODEL_FALLBACKS: Mapping[str, Callable[[ServedModel], bool]] = {
    "prompt_attention": lambda served: prompt_kernel_of(served.spec.model).slow_reason is not None,
    "eight_bit_products": lambda served: served.engine.runner.layers.decoder.sharing_obstacle() is not None,
    "graphs": _is_uncaptured,
}


def _coming_bytes(holding: Holding, hosted: HostedModel) -> int:
    """Return the bytes of weights, as served, that a load under way still has to copy."""
    if not hosted.is_loading or not holding.stored_bytes:
        return 0
    loaded_bytes = holding.weights_bytes * hosted.loaded_bytes // holding.stored_bytes
    return max(0, holding.weights_bytes - loaded_bytes)
