"""How many bytes of each model lie in the device memory of each worker. No promise depends on it.

The numbers may be a moment old, so they only affect estimates.
"""

from __future__ import annotations

from collections.abc import Mapping

from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.events import Action, Evict
from hearth.policy.fleet.records import Model, Worker


def record_bytes(model: Model, worker: Worker, num_bytes: int) -> None:
    most = 0 if model.profile is None else model.profile.num_bytes
    if (known_bytes := min(num_bytes, most)) > 0:
        model.resident_bytes[worker.name] = known_bytes
        worker.resident_models[model.name] = model
    else:
        model.resident_bytes.pop(worker.name, None)
        worker.resident_models.pop(model.name, None)
    rank_retired(model, worker)


def rank_retired(model: Model, worker: Worker) -> None:
    """Rank a worker by its bytes of a model without a replica. Called whenever one came or went."""
    num_bytes = model.resident_bytes.get(worker.name)
    if num_bytes is None or model.name in worker.replicas:
        model.retired.drop(worker.name)
    else:
        model.retired.put(worker.name, num_bytes)


def record_report(
    models: Mapping[ModelId, Model], worker: Worker, bytes_by_model: Mapping[ModelId, int]
) -> None:
    for model in list(worker.resident_models.values()):
        if model.name not in bytes_by_model:
            record_bytes(model, worker, 0)
    for name, num_bytes in bytes_by_model.items():
        known = models.get(name)
        # A replica of an older version has bytes of that one.
        if known is not None and not (name in worker.replicas and worker.replicas[name].is_outdated):
            record_bytes(known, worker, num_bytes)


def count_missing_bytes(model: Model, worker: Worker) -> int:
    replica = worker.replicas.get(model.name)
    if replica is not None and not replica.is_ready:
        return replica.total_bytes - replica.loaded_bytes
    if replica is not None and replica.stages:
        there = model.resident_bytes
        return sum(max(0, one.total_bytes - there.get(one.worker.name, 0)) for one in replica.stages)
    total_bytes = 0 if model.profile is None else model.profile.num_bytes
    return total_bytes - model.resident_bytes.get(worker.name, 0)


def forget_model(model: Model, workers: Mapping[WorkerId, Worker]) -> None:
    for name in list(model.resident_bytes):
        record_bytes(model, workers[name], 0)


def forget_worker(worker: Worker) -> None:
    for model in list(worker.resident_models.values()):
        record_bytes(model, worker, 0)


def free_retired(model: Model, workers: Mapping[WorkerId, Worker]) -> list[Action]:
    actions: list[Action] = []
    for name in model.retired:
        record_bytes(model, workers[name], 0)
        actions.append(Evict(model.name, name, 0.0, is_freed=True))
    return actions
