"""The cost of reloading evicted bytes: the one price by which brain, worker and keeper evict.

The cheapest bytes to reload are evicted first. All three estimate that in the same way, each from what it
sees: how often a model is requested, and how fast the rungs deliver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hearth.core.types import AdapterId, ModelId, Rung
from hearth.policy.memory.demand import Demand

#: Bytes are worth keeping for requests that come within this time.
HORIZON_S = 600.0
#: Bytes per second that a rung is taken to deliver until it has shown its own speed.
PRIOR_BYTES_PER_S: Mapping[Rung, float] = MappingProxyType(
    {Rung.HOST: 20e9, Rung.DISK: 2e9, Rung.PEER: 1e9, Rung.OBJECT: 0.2e9}
)
#: The members on their own: a lookup in the enum costs as much as a call.
_HOST, _DISK, _PEER = Rung.HOST, Rung.DISK, Rung.PEER
_DISK_FIRST = (_HOST, _DISK, _PEER)
_PEER_FIRST = (_HOST, _PEER, _DISK)
_FROM_HOST: Mapping[Rung, float] = MappingProxyType({Rung.HOST: 1.0})
#: A paused model that is due sooner counts as due then.
MIN_DUE_S = 0.05
#: What was moved this many bytes ago counts half as much as what is moved now.
HALF_LIFE_BYTES = 4 << 30
#: A smaller load spends most of its time on beginning, so that its whole time says little about bytes.
MIN_TELLING_BYTES = 64 << 20


def reload_cost(p_wanted: float, load_s: float, weight: float) -> float:
    """Return the seconds that keeping some bytes is expected to save (Tangram's minimal-cost eviction).

    `p_wanted`: within the horizon. `weight`: how much a second of this model's start matters.
    """
    assert load_s >= 0, f"a load takes no negative time: {load_s=}"
    return p_wanted * load_s * weight


def share_load_time(
    bytes_by_rung: Mapping[Rung, int], busy_s_by_rung: Mapping[Rung, float], total_s: float | None
) -> Mapping[Rung, float]:
    """Share the time of a load among the rungs that delivered to it, by how long each was busy.

    Rungs are not all that a load waits for, and may be busy at the same time. `total_s`: of the whole load;
    None: not all of the bytes came within it.
    """
    busy_s = sum(busy_s_by_rung.values())
    if total_s is None or busy_s <= 0 or sum(bytes_by_rung.values()) < MIN_TELLING_BYTES:
        return busy_s_by_rung
    return {rung: total_s * seconds / busy_s for rung, seconds in busy_s_by_rung.items()}


@dataclass(slots=True)
class RunningRate:
    """How fast a rung delivers, as a running average over bytes, not time. Mutable; one caller at a time."""

    #: Decayed sums; both positive, or both 0 before the first transfer.
    num_bytes: float = 0.0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first transfer, otherwise positive."""
        return self.num_bytes / self.seconds if self.seconds else None

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one transfer; ignores one without bytes, or too fast for the clock."""
        if num_bytes <= 0 or seconds <= 0:
            return
        decay = 0.5 ** (num_bytes / HALF_LIFE_BYTES)
        self.num_bytes = self.num_bytes * decay + num_bytes
        self.seconds = self.seconds * decay + seconds


@dataclass(slots=True)
class ReloadCosts:
    """The demand for models and the speed of rungs, and the reload cost that follows from both.

    Mutable; one caller at a time. Models are identified by any string.
    """

    priors: Mapping[Rung, float] = field(default_factory=lambda: PRIOR_BYTES_PER_S)
    demand: Demand = field(default_factory=Demand)
    rates: dict[Rung, RunningRate] = field(default_factory=lambda: {rung: RunningRate() for rung in Rung})

    def asked(self, model: str, now_s: float, num_requests: int = 1) -> None:
        self.demand.arrived(model, now_s, num_requests)

    def forget(self, model: str) -> None:
        """Forget a removed model: another of the same name may be nothing like it."""
        self.demand.forget(model)

    def moved(self, rung: Rung, num_bytes: int, seconds: float) -> None:
        self.rates[rung].add(num_bytes, seconds)

    def learn_load(
        self,
        bytes_by_rung: Mapping[Rung, int],
        busy_s_by_rung: Mapping[Rung, float],
        total_s: float | None,
    ) -> None:
        """Learn the speed of rungs from one load; arguments as of `share_load_time`."""
        for rung, seconds in share_load_time(bytes_by_rung, busy_s_by_rung, total_s).items():
            self.moved(rung, bytes_by_rung[rung], seconds)

    def bytes_per_s(self, rung: Rung) -> float:
        return self.rates[rung].bytes_per_s or self.priors.get(rung, PRIOR_BYTES_PER_S[rung])

    def measured_rates(self) -> dict[Rung, float]:
        rates = {rung: rate.bytes_per_s for rung, rate in self.rates.items()}
        return {rung: bytes_per_s for rung, bytes_per_s in rates.items() if bytes_per_s is not None}

    def load_s(
        self,
        num_bytes: int,
        bytes_by_rung: Mapping[Rung, int] | None,
        peer_bytes_per_s: float | None = None,
    ) -> float:
        """Return how long a load takes: missing bytes per rung over its speed.

        Host memory delivers what it has, then the faster one of disk and another node. Unreported bytes are
        assumed on disk. `peer_bytes_per_s`: from the other node; None: as from any.
        """
        if bytes_by_rung is None:
            return num_bytes / self.bytes_per_s(_DISK)
        load_s, order = 0.0, _DISK_FIRST
        if bytes_by_rung.get(_PEER, 0):
            peer_bytes_per_s = peer_bytes_per_s or self.bytes_per_s(_PEER)
            order = _PEER_FIRST if peer_bytes_per_s > self.bytes_per_s(_DISK) else _DISK_FIRST
        for rung in order:
            if part_bytes := min(num_bytes, bytes_by_rung.get(rung, 0)):
                speed = peer_bytes_per_s if rung is _PEER else None
                load_s += part_bytes / (speed or self.bytes_per_s(rung))
                num_bytes -= part_bytes
            if not num_bytes:
                return load_s
        return load_s + num_bytes / self.bytes_per_s(Rung.OBJECT)

    def p_wanted(self, model: str, now_s: float) -> float:
        return self.demand.probability(model, now_s, HORIZON_S)

    def cost_s(self, model: str, load_s: float, weight: float, now_s: float) -> float:
        return reload_cost(self.p_wanted(model, now_s), load_s, weight)


class DeviceReloadCosts:
    """The reload cost per byte of each model or adapter on one worker's device.

    Mutable; one caller at a time. Bytes are assumed to come back from where they came last.
    """

    def __init__(self) -> None:
        self._costs = ReloadCosts()
        self._weights: dict[ModelId | AdapterId, float] = {}
        #: By model that was ever loaded here: the shares of its last load by rung.
        self._shares: dict[ModelId | AdapterId, Mapping[Rung, float]] = {}

    @property
    def demand(self) -> Demand:
        return self._costs.demand

    def hosted(self, model: ModelId | AdapterId, weight: float) -> None:
        self._weights[model] = weight

    def asked(self, model: ModelId | AdapterId, now_s: float) -> None:
        self._costs.asked(model, now_s)

    def learn_load(
        self,
        model: ModelId | AdapterId,
        bytes_by_rung: Mapping[Rung, int],
        busy_s_by_rung: Mapping[Rung, float],
        total_s: float | None,
    ) -> None:
        """Learn from one load how fast rungs deliver, and where the model comes from.

        Arguments are those of `share_load_time`. Ignores an empty load.
        """
        self._costs.learn_load(bytes_by_rung, busy_s_by_rung, total_s)
        num_bytes = sum(bytes_by_rung.values())
        if num_bytes > 0:
            self._shares[model] = {rung: part / num_bytes for rung, part in bytes_by_rung.items()}

    def forget(self, model: ModelId | AdapterId) -> None:
        self._costs.forget(model)
        self._weights.pop(model, None)
        self._shares.pop(model, None)

    def measured_rates(self) -> dict[Rung, float]:
        return self._costs.measured_rates()

    def load_s_per_byte(self, model: ModelId | AdapterId) -> float:
        """Return how long one byte takes to load; from host memory if the model was never loaded."""
        shares = self._shares.get(model, _FROM_HOST)
        if len(shares) == 1:  # as most adapters: all that are idle are priced between two steps
            (rung,) = shares
            return 1 / self._costs.bytes_per_s(rung)
        return sum(share / self._costs.bytes_per_s(rung) for rung, share in shares.items())

    def cost_s_per_byte(self, model: ModelId | AdapterId, now_s: float) -> float:
        weight = self._weights.get(model, 1.0)
        return self._costs.cost_s(model, self.load_s_per_byte(model), weight, now_s)

    def adapter_cost_per_byte(self, adapter: AdapterId, now_s: float) -> float:
        """Return the seconds of reloads that keeping one byte of an adapter saves per second."""
        weight = self._weights.get(adapter, 1.0)
        return self._costs.demand.requests_per_s(adapter, now_s) * self.load_s_per_byte(adapter) * weight

    def paused_cost_s_per_byte(self, model: ModelId | AdapterId, due_in_s: float) -> float:
        """Return the reload cost of one byte of a model that waits for its turn, due in `due_in_s`."""
        return self.load_s_per_byte(model) / max(due_in_s, MIN_DUE_S)
