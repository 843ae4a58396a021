"""GPU time: how long devices are held, by which models and for which requests. The base of all costs.

A device is held while it has a replica that is not retained: from the order to load it until it has been idle
for its `keep_alive`. Such replicas share the time of their device by the memory that they are promised.
Requests that run on a model at the same time share the model's evenly; a model without one holds idle time.
So the times of models add up to the total, and those of requests and idle time to that of their model.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from hearth.core.types import ModelId, RequestId, WorkerId, model_of
from hearth.policy.fleet.capacity import RETAINED
from hearth.policy.fleet.records import Request, Worker

SECONDS_PER_HOUR = 3600.0
#: More than devices are taken in a simulation; a service runs for months.
MAX_GAPS = 1 << 16


def cost_of(gpu_s: float, hour_price: float | None) -> float | None:
    """Return the price of GPU time; None: no price is set."""
    return None if hour_price is None else gpu_s / SECONDS_PER_HOUR * hour_price


@dataclass(slots=True)
class ModelTime:
    """Mutable; written by its `GpuTime`."""

    held_s: float = 0.0
    idle_s: float = 0.0  #: of `held_s`, without a running request
    share: float = 0.0  #: of devices, held now
    num_running: int = 0
    per_request_s: float = 0.0  #: charged so far to a request that runs all the time
    since_s: float = 0.0  #: until when all this is counted

    def advance(self, now_s: float) -> None:
        seconds, self.since_s = self.share * (now_s - self.since_s), now_s
        self.held_s += seconds
        if self.num_running:
            self.per_request_s += seconds / self.num_running
        else:
            self.idle_s += seconds


@dataclass(slots=True)
class _Held:
    since_s: float
    device_share: float
    shares: dict[ModelId, float] = field(default_factory=dict)


class GpuTime:
    """Mutable; written by its fleet."""

    def __init__(self) -> None:
        self.by_model: dict[ModelId, ModelTime] = {}
        #: By API key, or tenant of a trace, since `take_by_key`; None: of requests without one.
        self.by_key: dict[str | None, float] = {}
        self.most = 0  #: devices held at a time
        #: How long devices taken of late had been free. The one freed last is taken; inf: none was.
        self.gaps_s: deque[float] = deque(maxlen=MAX_GAPS)
        self._freed_s: list[float] = []  #: when devices were freed that are not held again
        self._held: dict[WorkerId, _Held] = {}
        self._ended_s = 0.0  #: of devices that are not held any more
        self._begun: dict[RequestId, float] = {}  #: `per_request_s` when it started

    @property
    def num_held(self) -> int:
        return len(self._held)

    def total_s(self, now_s: float) -> float:
        """Return the device-seconds until now."""
        held = self._held.values()
        return self._ended_s + sum(one.device_share * (now_s - one.since_s) for one in held)

    def model(self, name: ModelId, now_s: float) -> ModelTime:
        """Return the time of a model until now."""
        time = self.by_model.get(name)
        if time is None:
            time = self.by_model[name] = ModelTime()
        time.advance(now_s)
        return time

    def note(self, worker: Worker, now_s: float) -> None:
        """Note that the hold of a replica on a worker has changed."""
        promised: dict[ModelId, int] = {}
        for name, replica in worker.replicas.items():
            if replica.hold is not None and replica.hold is not RETAINED:
                model = model_of(name)
                promised[model] = promised.get(model, 0) + max(1, replica.promise_on(worker).own_bytes)
        held = self._held.get(worker.name)
        if promised and held is None:
            held = self._held[worker.name] = _Held(now_s, worker.device_share)
            self.most = max(self.most, len(self._held))
            self.gaps_s.append(now_s - self._freed_s.pop() if self._freed_s else math.inf)
        elif held is None:
            return
        total_bytes = sum(promised.values())
        shares = {name: held.device_share * num_bytes / total_bytes for name, num_bytes in promised.items()}
        for name in {**held.shares, **shares}:
            if (more := shares.get(name, 0.0) - held.shares.get(name, 0.0)) != 0.0:
                self.model(name, now_s).share += more
        held.shares = shares
        if not shares:
            self._ended_s += held.device_share * (now_s - held.since_s)
            self._freed_s.append(now_s)
            del self._held[worker.name]

    def start(self, request: Request, now_s: float) -> None:
        time = self.model(model_of(request.model.name), now_s)
        time.num_running += 1
        self._begun[request.request_id] = time.per_request_s

    def stop(self, request: Request, now_s: float) -> None:
        time, begun_s = self.model(model_of(request.model.name), now_s), self._begun.pop(request.request_id)
        time.num_running -= 1
        self.by_key[request.key] = self.by_key.get(request.key, 0.0) + time.per_request_s - begun_s

    def take_by_key(self) -> dict[str | None, float]:
        taken, self.by_key = self.by_key, {}
        return taken

    def forget(self, name: ModelId) -> None:
        """Forget a model that was removed, unless it still holds a device or has a request."""
        time = self.by_model.get(name)
        is_held = any(name in one.shares for one in self._held.values())
        if time is not None and not is_held and not time.num_running:
            del self.by_model[name]
