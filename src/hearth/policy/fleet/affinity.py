"""What lies of which model in the device memory of which worker (T6): books that no promise depends on.

A model is loaded, and its requests go, where most of it is already; `routing.py` decides that. What is noted
here may be a moment old, so it only ever makes an estimate better or worse.
"""

from __future__ import annotations

from collections.abc import Mapping

from hearth.policy.fleet.events import Action, Evict
from hearth.policy.fleet.replica import Model, Worker
from hearth.types import ModelId, WorkerId


def note(model: Model, worker: Worker, num_bytes: int) -> None:
    """So much of the model is there now."""
    most = 0 if model.profile is None else model.profile.num_bytes
    if (known_bytes := min(num_bytes, most)) > 0:
        model.resident[worker.name] = known_bytes
        worker.resident[model.name] = model
    else:
        model.resident.pop(worker.name, None)
        worker.resident.pop(model.name, None)
    rank_retired(model, worker)


def rank_retired(model: Model, worker: Worker) -> None:
    """To be called when a replica came or went."""
    num_bytes = model.resident.get(worker.name)
    if num_bytes is None or worker.name in model.replicas:
        model.retired.drop(worker.name)
    else:
        model.retired.put(worker.name, num_bytes)


def note_all(models: Mapping[ModelId, Model], worker: Worker, bytes_by_model: Mapping[ModelId, int]) -> None:
    """What a worker has, of all models; those that are not deployed do not count."""
    for model in list(worker.resident.values()):
        if model.name not in bytes_by_model:
            note(model, worker, 0)
    for name, num_bytes in bytes_by_model.items():
        known = models.get(name)
        # One that serves an older version has bytes of that.
        if known is not None and not (name in worker.replicas and worker.replicas[name].is_outdated):
            note(known, worker, num_bytes)


def missing_bytes(model: Model, worker: Worker) -> int:
    """What has to be loaded before the model can run there.

    That may be something of a ready replica too: KV of others took it while the model was idle.
    """
    replica = worker.replicas.get(model.name)
    if replica is not None and not replica.is_ready:
        return replica.total_bytes - replica.loaded_bytes
    total_bytes = 0 if model.profile is None else model.profile.num_bytes
    return total_bytes - model.resident.get(worker.name, 0)


def forget_bytes(model: Model, workers: Mapping[WorkerId, Worker]) -> None:
    """It is another one now."""
    for name in list(model.resident):
        note(model, workers[name], 0)


def forget_worker(worker: Worker) -> None:
    for model in list(worker.resident.values()):
        note(model, worker, 0)


def free_retired(model: Model, workers: Mapping[WorkerId, Worker]) -> list[Action]:
    """Have all go that is left of it on workers where it has no replica."""
    actions: list[Action] = []
    for name in model.retired:
        note(model, workers[name], 0)
        actions.append(Evict(model.name, name, 0.0, is_freed=True))
    return actions
