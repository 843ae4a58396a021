"""How long the memory of simulated devices is held: what a provider would charge for."""

from __future__ import annotations

import math

from hearth.core.types import WorkerId
from hearth.policy.fleet.capacity import RETAINED
from hearth.policy.fleet.fleet import Fleet


class HeldDevices:
    """A device is held while it has a model that is not retained: from the order to load it until it has been
    idle for its `keep_alive`. Mutable; written by its service.
    """

    def __init__(self) -> None:
        self.most = 0  #: devices held at a time
        #: How long each device that was taken had been free. The one freed last is taken; inf: none was.
        self.gaps_s: list[float] = []
        self._freed_s: list[float] = []  #: when devices were freed that are not held again
        self._since_s: dict[WorkerId, float] = {}
        self._ended_s = 0.0  #: of devices that are not held any more

    def note(self, fleet: Fleet) -> list[WorkerId]:
        """Note a step of the brain; return the devices that only have retained models."""
        held, retained = set[WorkerId](), list[WorkerId]()
        for name, worker in fleet.workers.items():
            if any(replica.hold is not RETAINED for replica in worker.replicas.values()):
                held.add(name)
            elif worker.replicas:
                retained.append(name)
        for name in [name for name in self._since_s if name not in held]:
            self._ended_s += fleet.now_s - self._since_s.pop(name)
            self._freed_s.append(fleet.now_s)
        for name in held - self._since_s.keys():
            self._since_s[name] = fleet.now_s
            self.gaps_s.append(fleet.now_s - self._freed_s.pop() if self._freed_s else math.inf)
        self.most = max(self.most, len(held))
        return retained

    def total_s(self, now_s: float) -> float:
        """Return the device-seconds until now."""
        return self._ended_s + sum(now_s - since_s for since_s in self._since_s.values())
