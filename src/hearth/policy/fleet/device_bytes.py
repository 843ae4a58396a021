"""How many bytes of which model lie in the device memory of which worker: books that no promise depends on.

A model is loaded, and its requests go, where most of it is already; `routing.py` decides that. What these
books say may be a moment old, so it only ever makes an estimate better or worse.
"""

from __future__ import annotations

from collections.abc import Mapping

from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.events import Action, Evict
from hearth.policy.fleet.records import Model, Worker


def record_bytes(model: Model, worker: Worker, num_bytes: int) -> None:
    """Write down that so many bytes of a model are on a worker now."""
    most = 0 if model.profile is None else model.profile.num_bytes
    if (known_bytes := min(num_bytes, most)) > 0:
        model.resident_bytes[worker.name] = known_bytes
        worker.resident_models[model.name] = model
    else:
        model.resident_bytes.pop(worker.name, None)
        worker.resident_models.pop(model.name, None)
    rank_retired(model, worker)


def rank_retired(model: Model, worker: Worker) -> None:
    """Rank a worker by its bytes of a model, if it has no replica; called whenever one came or went."""
    num_bytes = model.resident_bytes.get(worker.name)
    if num_bytes is None or worker.name in model.replicas:
        model.retired.drop(worker.name)
    else:
        model.retired.put(worker.name, num_bytes)


def record_report(
    models: Mapping[ModelId, Model], worker: Worker, bytes_by_model: Mapping[ModelId, int]
) -> None:
    """Write down all that a worker says it has; models that are not deployed do not count."""
    for model in list(worker.resident_models.values()):
        if model.name not in bytes_by_model:
            record_bytes(model, worker, 0)
    for name, num_bytes in bytes_by_model.items():
        known = models.get(name)
        # A replica of an older version has bytes of that one.
        if known is not None and not (name in worker.replicas and worker.replicas[name].is_outdated):
            record_bytes(known, worker, num_bytes)


def count_missing_bytes(model: Model, worker: Worker) -> int:
    """Return how many bytes have to be loaded before a model can run on a worker.

    That may be some of a ready replica too: KV of others took them while the model was idle.
    """
    replica = worker.replicas.get(model.name)
    if replica is not None and not replica.is_ready:
        return replica.total_bytes - replica.loaded_bytes
    total_bytes = 0 if model.profile is None else model.profile.num_bytes
    return total_bytes - model.resident_bytes.get(worker.name, 0)


def forget_model(model: Model, workers: Mapping[WorkerId, Worker]) -> None:
    """Count no bytes of a model any more, because other bytes are deployed under its name."""
    for name in list(model.resident_bytes):
        record_bytes(model, workers[name], 0)


def forget_worker(worker: Worker) -> None:
    """Count no bytes on a worker any more, because it was lost."""
    for model in list(worker.resident_models.values()):
        record_bytes(model, worker, 0)


def free_retired(model: Model, workers: Mapping[WorkerId, Worker]) -> list[Action]:
    """Order workers without a replica of a model to free what they still have of it."""
    actions: list[Action] = []
    for name in model.retired:
        record_bytes(model, workers[name], 0)
        actions.append(Evict(model.name, name, 0.0, is_freed=True))
    return actions
