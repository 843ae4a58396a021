"""The traffic that a service has recorded in its journal, as a workload for simulations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.journal import previous, read
from hearth.core.errors import ConfigError
from hearth.core.types import ModelId, RequestId
from hearth.policy.fleet.events import (
    ModelDeployed,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.profile import ModelProfile
from hearth.sim.profile import Profile
from hearth.sim.traces import Trace, TracedRequest


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    trace: Trace  #: of finished requests; its tenants are the names of models
    models: dict[ModelId, ModelProfile]  #: that it asks for
    num_workers: int  #: at a time, at most
    memory_bytes: int  #: of the smallest worker
    num_unfinished: int  #: requests that are left out: the length of their answers is unknown

    def add_models(self, machine: Profile) -> dict[ModelId, str]:
        """Add the models to a profile, scaled from the nearest shape; return their names there."""
        for model, deployed in self.models.items():
            kv_bytes = max(footprint.kv_token_bytes for footprint in deployed.footprints.values())
            shape = machine.scaled(str(model), deployed.num_bytes, max(1, kv_bytes))
            machine.shapes = {**machine.shapes, str(model): shape}
        return {model: str(model) for model in self.models}


def read_traffic(data_dir: Path) -> RecordedTraffic:
    """Read both files of a journal. Raises ConfigError if no request was finished, or DataDirError."""
    path = DataDir(data_dir).journal_path
    models: dict[ModelId, ModelProfile] = {}
    arrivals: dict[RequestId, RequestArrived] = {}
    finished, num_workers, memory_bytes, last_s = list[TracedRequest](), 1, math.inf, -math.inf
    for part in (previous(path), path):
        if not part.exists():
            continue
        fleet, entries = read(part)
        models |= {model.name: model.profile for model in fleet.models.values() if model.profile is not None}
        budgets = {worker.name: worker.promises.budget_bytes for worker in fleet.workers.values()}
        for event, _ in filter(None, entries):
            if event.now_s < last_s:  # the machine was started again, and with it the clock
                finished.clear()
            last_s = event.now_s
            match event:
                case ModelDeployed(_, profile):
                    models[profile.model] = profile
                case WorkerJoined(_, worker, _, budget_bytes):
                    budgets[worker] = budget_bytes
                case WorkerLost(_, worker):
                    budgets.pop(worker, None)
                case RequestArrived(_, request_id):
                    arrivals[request_id] = event
                case RequestFinished(_, request_id, num_output) if request_id in arrivals and num_output:
                    arrived = arrivals.pop(request_id)
                    num_prompt, key = max(1, arrived.num_prompt_tokens), arrived.key
                    finished.append(
                        TracedRequest(arrived.now_s, arrived.model, num_prompt, num_output, key=key)
                    )
                case _:
                    pass
            num_workers = max(num_workers, len(budgets))
            memory_bytes = min([memory_bytes, *budgets.values()])
    if not finished:
        raise ConfigError(
            f"no finished request is recorded in `{path}`; a service records them there while "
            "`service.journal_bytes` is above 0"
        )
    trace = Trace.of("recorded traffic", finished)
    trace = trace.window(trace.requests[0].arrival_s)
    asked = {ModelId(name): models[ModelId(name)] for name in trace.tenants}
    return RecordedTraffic(trace, asked, num_workers, int(memory_bytes), len(arrivals))
