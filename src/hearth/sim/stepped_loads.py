"""Loads of the models on a simulated worker, one after another over its bus."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from hearth.core.types import ModelId, Rung, model_of
from hearth.policy.fleet.events import RungUse
from hearth.policy.turns.turn_policy import TurnPolicy
from hearth.sim.profile import NO_LEAST, LeastSeconds, Profile
from hearth.sim.reclaimer import SimulatedReclaimer
from hearth.sim.stepped_model import HostOrder, LoadUnderWay, SteppedModel

#: The rung of a load that had no bytes to move.
ON_DEVICE = "device"
#: Returns when bytes that a worker lacks of a model are in host memory of its machine, and where from.
Source = Callable[[HostOrder, int], tuple[float, Rung]]


def in_host_memory(_order: HostOrder, _num_bytes: int) -> tuple[float, Rung]:
    return 0.0, Rung.HOST


class SteppedLoads:
    """Mutable; only its worker calls it, and is told by `complete` when a model has all its weights."""

    def __init__(
        self,
        profile: Profile,
        hosted: Mapping[ModelId, SteppedModel],
        turns: TurnPolicy | None,
        reclaimer: SimulatedReclaimer,
        complete: Callable[[ModelId, LoadUnderWay], None],
        source: Source,
    ) -> None:
        self._profile, self._hosted, self._turns = profile, hosted, turns
        self._reclaimer, self._complete, self._source = reclaimer, complete, source
        self.cold_starts: Counter[str] = Counter()  #: requests that waited for a load, by the rung of it
        self.num_ended = self.bytes_moved = 0
        self.bus_s = 0.0  #: time in which bytes were transferred
        self._bus_free_s = 0.0

    @property
    def is_any_under_way(self) -> bool:
        return any(one.load is not None for one in self._hosted.values())

    @property
    def least(self) -> LeastSeconds:
        return self._profile.beside_load if self.is_any_under_way else NO_LEAST

    def next_s(self, now_s: float) -> float:
        """When a load ends, or may be followed by a step; infinite: there is none."""
        loads = [one.load for one in self._hosted.values() if one.load is not None]
        follows = [load.follow_s for load in loads if load.follow_s > now_s]
        return min([math.inf, *follows, *(load.end_s for load in loads)])

    def can_be_followed(self, model: ModelId, now_s: float) -> bool:
        hosted = self._hosted[model]
        return hosted.load is not None and hosted.is_assembled and hosted.load.follow_s <= now_s

    def is_loaded(self, model: ModelId) -> bool:
        return self._hosted[model].load is None and not self._reclaimer.is_incomplete(model)

    def begin(self, model: ModelId, now_s: float, flushed_s: float) -> None:
        """Load what a model lacks, unless it is deferred. The bytes that it replaces are read until
        `flushed_s`."""
        hosted = self._hosted[model]
        if hosted.load is not None or self.is_loaded(model):
            return
        stages = [one for one in self._hosted if one != model and model_of(one) == model]
        if not all(map(self.is_loaded, stages)):
            self._reclaimer.policy.defer(model, is_any_loading=True)  # it is loaded behind them
            return
        num_bytes = self._reclaimer.place(model)
        if num_bytes is None:
            return
        shared_bytes = sum(self._hosted[one].order.profile.num_bytes for one in stages)
        ready_s = now_s
        if not hosted.is_assembled:
            ready_s += self._profile.assemble_s
        elif hosted.is_returning:
            ready_s += self._profile.return_s
        if not num_bytes and ready_s == now_s:
            load = LoadUnderWay(ready_s, ready_s, 0)
            self._count_cold(model, load)
            self._complete(model, load)
            return
        begin_s = end_s = ready_s
        if num_bytes:
            begin_s = max(ready_s, self._bus_free_s, flushed_s)
            end_s = self._transfer(max(0, num_bytes - shared_bytes), begin_s)
            hosted.engine.is_behind_load = True
        arrived_s, rung = self._source(hosted.order, num_bytes)
        rung = Rung.HOST if arrived_s <= end_s else rung
        hosted.load = LoadUnderWay(
            begin_s, max(end_s, arrived_s), num_bytes, rung=rung, shared_bytes=shared_bytes
        )

    def cancel(self, hosted: SteppedModel, now_s: float) -> None:
        """Note that a model leaves, perhaps while it is loaded: the bus is free for the next load."""
        if (load := hosted.load) is not None and load.num_bytes:
            self._bus_free_s = max(now_s, self._bus_free_s - (load.end_s - max(now_s, load.began_s)))

    def begin_front(self, now_s: float) -> None:
        if self._turns is None or self.is_any_under_way:
            return
        line = self._turns.next_in_line(now_s)
        model = self._turns.next_prefetch(line, lambda name: self._reclaimer.missing_bytes(name) > 0)
        num_bytes = 0 if model is None else self._reclaimer.place_front(model, self._turns.front_bytes)
        if model is not None and num_bytes:
            begin_s = max(now_s, self._bus_free_s)
            end_s = self._transfer(num_bytes, begin_s)
            arrived_s, rung = self._source(self._hosted[model].order, num_bytes)
            rung = Rung.HOST if arrived_s <= end_s else rung
            load = LoadUnderWay(begin_s, max(end_s, arrived_s), num_bytes, is_front=True, rung=rung)
            self._hosted[model].load = load

    def _transfer(self, num_bytes: int, begin_s: float) -> float:
        self._bus_free_s = begin_s + self._profile.give_way_s + self._seconds(num_bytes)
        return self._bus_free_s

    def uses_of(self, load: LoadUnderWay) -> tuple[RungUse, ...]:
        num_bytes = load.moved_bytes
        if load.rung is not Rung.HOST:
            return (RungUse(load.rung, num_bytes, load.end_s - load.began_s),)
        return (RungUse(Rung.HOST, num_bytes, self._seconds(num_bytes)),) if num_bytes else ()

    def _seconds(self, num_bytes: int) -> float:
        return num_bytes / self._profile.bytes_per_s[Rung.HOST]

    def end(self, model: ModelId, load: LoadUnderWay) -> None:
        self._hosted[model].load = None
        if load.moved_bytes:
            seconds = self._seconds(load.moved_bytes)
            self.bytes_moved += load.moved_bytes
            self.bus_s += seconds
            self._reclaimer.costs.learn_load(
                model, {Rung.HOST: load.moved_bytes}, {Rung.HOST: seconds}, total_s=seconds
            )
        self._reclaimer.policy.note_freed()
        if not load.is_front:
            self.num_ended += 1
            self._count_cold(model, load)
            self._complete(model, load)

    def _count_cold(self, model: ModelId, load: LoadUnderWay) -> None:
        hosted = self._hosted[model]
        if hosted.num_cold:
            self.cold_starts[load.rung if load.num_bytes else ON_DEVICE] += hosted.num_cold
            hosted.num_cold = 0
