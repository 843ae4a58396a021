"""Views of the workers' memory, by model, purpose and state. Pure.

The parts of a pool are disjoint and make up its budget:

    weights   active: of a hosted model        retained: kept until the room is needed
    kv        active: of running requests      retained: cached prefixes    spare: a model's, but empty
    tables    active: of a placed model's engine, and of requests that are penalised or biased
    adapters  active: of running requests      retained: kept until the room is needed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hearth.control.observe.views import PartView, ResidentAdapterView, ResidentView, WorkerView
from hearth.core.messages import ModelUse, Pong
from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.residents import Resident, State

#: What each fallback of a worker means, after its count.
FALLBACKS = {
    "address": "at another address than planned",
    "driver_batches": "worker whose loads slow down its steps: no C compiler",
    "eight_bit_products": "models without workspace for 8-bit products: see the log",
    "stage_frames_dropped": "late or repeated frames of pipelines: harmless",
    "stage_memory": "pipelines pass hidden states through host memory: the GPU has no room for them",
    "first_steps_not_captured": "starts whose first steps ran without CUDA graphs: see the log",
    "graphs": "models that run without CUDA graphs: torch frees memory that graphs use",
    "graphs_not_restored": "from snapshots, captured again instead",
    "kernels_compiled_while_serving": "while all models of the worker waited",
    "kernels_loaded_while_serving": "from disk during a step",
    "late_collections": "of garbage during requests: the worker was never idle",
    "library_address": "worker whose library memory is at another address than planned",
    "packed_products": "worker that multiplies quantised weights slowly on a CPU: no C compiler",
    "prompt_attention": "models whose prompts use the slower attention kernel",
    "snapshots_without_graphs": "worker that captures all graphs itself: see the log",
    "staging": "worker that pins host memory while a load waits: no C compiler",
    "tables": "of penalties or biases outside the pool",
}


def pool_parts(pong: Pong) -> tuple[PartView, ...]:
    """Return the parts of a pool that hold something: by model name, then those of no single model."""
    uses = sorted(pong.models, key=lambda use: use.model)
    found = [part for use in uses for part in _parts_of(use)]
    found += _adapter_parts(pong)
    shared_bytes = _shared_once_bytes(pong)
    is_active = any(use.shared_bytes and _weights_state(use) == "active" for use in uses)
    found.append(PartView("weights", "active" if is_active else "retained", None, shared_bytes))
    found.append(PartView("workspace", "active", None, pong.workspace_bytes))
    left_bytes = max(0, pong.budget_bytes - sum(part.num_bytes for part in found))
    lost_bytes = min(pong.lost_bytes, left_bytes)
    found.append(PartView("lost", "spare", None, lost_bytes))
    found.append(PartView("free", "spare", None, left_bytes - lost_bytes))
    return tuple(part for part in found if part.num_bytes)


def resident_views(
    residents: Sequence[Resident], pongs: Mapping[WorkerId, Pong], now_s: float
) -> tuple[ResidentView, ...]:
    """Until a worker has reported a model, its view shows what the brain has promised."""
    hosted = {(one.worker, one.model): one for one in residents}
    used = {(worker, use.model): use for worker, pong in pongs.items() for use in pong.models}
    views = []
    for worker, model in sorted(hosted.keys() | used.keys()):
        one, use = hosted.get((worker, model)), used.get((worker, model))
        if use is not None and (one is not None or use.weights_bytes):
            views.append(_used_view(worker, use, one, now_s, _adapters_of(model, pongs[worker])))
        elif one is not None:
            views.append(_promised_view(one, now_s))
    return tuple(views)


def fallbacks(worker: WorkerView) -> Iterator[str]:
    if worker.pool is not None:
        for name, number in sorted(worker.pool.fallbacks.items()):
            if number:
                yield f"fallback {name}: {number} {FALLBACKS.get(name, 'times')}"


def _adapter_parts(pong: Pong) -> list[PartView]:
    sums: Counter[tuple[ModelId, str]] = Counter()
    for use in pong.adapters:
        sums[use.base, "active" if use.num_running or use.is_pinned else "retained"] += use.num_bytes
    return [PartView("adapters", state, base, sums[base, state]) for base, state in sorted(sums)]


def _adapters_of(model: ModelId, pong: Pong) -> tuple[ResidentAdapterView, ...]:
    views = [
        ResidentAdapterView(use.name, use.num_bytes, use.num_running, use.num_waiting, use.is_pinned)
        for use in pong.adapters
        if use.base == model
    ]
    return tuple(sorted(views, key=lambda view: (-view.num_running, -view.num_waiting, view.name)))


def _parts_of(use: ModelUse) -> Iterator[PartView]:
    yield PartView("weights", _weights_state(use), use.model, use.weights_bytes - use.shared_bytes)
    # The worker counts blocks and bytes at two moments, so there may be less memory than blocks would take.
    used_bytes = min(use.kv_bytes, use.kv_used_blocks * use.block_bytes)
    cached_bytes = min(use.kv_bytes - used_bytes, use.kv_cached_blocks * use.block_bytes)
    yield PartView("kv", "active", use.model, used_bytes)
    yield PartView("kv", "retained", use.model, cached_bytes)
    yield PartView("kv", "spare", use.model, use.kv_bytes - used_bytes - cached_bytes)
    yield PartView("tables", "active", use.model, use.tables_bytes)


def _weights_state(use: ModelUse) -> str:
    return "active" if use.is_hosted and use.hold > Hold.RETAINED else "retained"


def _shared_once_bytes(pong: Pong) -> int:
    """Return the bytes that models share, counted once: what the other parts leave of the pool."""
    most_bytes = sum(use.shared_bytes for use in pong.models)
    own_bytes = sum(
        use.weights_bytes - use.shared_bytes + use.kv_bytes + use.tables_bytes for use in pong.models
    )
    others_bytes = pong.free_bytes + pong.workspace_bytes + pong.lost_bytes
    others_bytes += sum(use.num_bytes for use in pong.adapters)
    taken_bytes = pong.budget_bytes - others_bytes - own_bytes
    return max(0, min(most_bytes, taken_bytes))


def _used_view(
    worker: WorkerId,
    use: ModelUse,
    one: Resident | None,
    now_s: float,
    adapters: tuple[ResidentAdapterView, ...],
) -> ResidentView:
    """The state is the brain's. A model that the brain no longer knows is retired, or about to be."""
    loading = one if one is not None and one.state is State.LOADING else None
    pipeline = use.pipeline
    return ResidentView(
        model=use.model,
        worker=worker,
        state=State.RETAINED if one is None else one.state,
        num_bytes=use.weights_bytes + use.kv_bytes + use.tables_bytes,
        loaded_bytes=use.weights_bytes - use.coming_bytes if loading is None else loading.loaded_bytes,
        total_bytes=use.total_bytes if loading is None else loading.total_bytes,
        num_running=0 if one is None else one.num_running,
        expires_in_s=_expires_in_s(one, now_s),
        is_hosted=one is not None,
        shared_bytes=use.shared_bytes,
        kv_bytes=use.kv_bytes,
        kv_used_blocks=use.kv_used_blocks,
        kv_cached_blocks=use.kv_cached_blocks,
        kv_blocks=use.kv_blocks,
        is_in_turn=use.is_in_turn,
        due_in_s=use.due_s,
        is_pin_refused=one is not None and one.is_pin_refused,
        kv_demand_tokens=0 if one is None else one.demand_tokens,
        kv_room_tokens=0 if one is None else one.room_tokens,
        is_dropped=one is not None and one.is_dropped,
        max_seqs=None if one is None else one.max_seqs,
        adapters=adapters,
        layers=None if one is None else one.layers,
        transport=None if one is None else one.transport,
        stage_s=() if pipeline is None else pipeline.stage_s,
        hops_s=0.0 if pipeline is None else pipeline.hops_s,
        num_flights=None if pipeline is None else pipeline.num_flights,
    )


def _promised_view(one: Resident, now_s: float) -> ResidentView:
    return ResidentView(
        model=one.model,
        worker=one.worker,
        state=one.state,
        num_bytes=one.num_bytes,
        loaded_bytes=one.loaded_bytes,
        total_bytes=one.total_bytes,
        num_running=one.num_running,
        expires_in_s=_expires_in_s(one, now_s),
        is_pin_refused=one.is_pin_refused,
        max_seqs=one.max_seqs,
        layers=one.layers,
        transport=one.transport,
    )


def _expires_in_s(one: Resident | None, now_s: float) -> float | None:
    return None if one is None or one.expires_s is None else one.expires_s - now_s
