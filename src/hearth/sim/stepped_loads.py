"""Loads of the models on a simulated worker, one after another over its bus."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hearth.core.types import ModelId, Rung, model_of
from hearth.policy.fleet.events import RungUse
from hearth.policy.turns.turn_policy import TurnPolicy
from hearth.sim.profile import NO_LEAST, LeastSeconds, Profile
from hearth.sim.reclaimer import SimulatedReclaimer
from hearth.sim.stepped_model import LoadUnderWay, SteppedModel


class SteppedLoads:
    """Mutable; only its worker calls it, and is told by `complete` when a model has all its weights."""

    def __init__(
        self,
        profile: Profile,
        hosted: Mapping[ModelId, SteppedModel],
        turns: TurnPolicy | None,
        reclaimer: SimulatedReclaimer,
        complete: Callable[[ModelId, LoadUnderWay], None],
    ) -> None:
        self._profile, self._hosted, self._turns = profile, hosted, turns
        self._reclaimer, self._complete = reclaimer, complete
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
            return  # it is loaded behind them
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
            self._complete(model, LoadUnderWay(ready_s, ready_s, 0))
            return
        begin_s = end_s = ready_s
        if num_bytes:
            begin_s = max(ready_s, self._bus_free_s, flushed_s)
            end_s = self._transfer(max(0, num_bytes - shared_bytes), begin_s)
            hosted.engine.is_behind_load = True
        arrived_s = hosted.order.arrived_s
        is_from_peer = arrived_s > end_s
        hosted.load = LoadUnderWay(
            begin_s, max(end_s, arrived_s), num_bytes, is_from_peer=is_from_peer, shared_bytes=shared_bytes
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
            self._hosted[model].load = LoadUnderWay(begin_s, end_s, num_bytes, is_front=True)

    def _transfer(self, num_bytes: int, begin_s: float) -> float:
        self._bus_free_s = begin_s + self._profile.give_way_s + self._seconds(num_bytes)
        return self._bus_free_s

    def uses_of(self, load: LoadUnderWay) -> tuple[RungUse, ...]:
        num_bytes = load.moved_bytes
        if load.is_from_peer:
            return (RungUse(Rung.PEER, num_bytes, load.end_s - load.began_s),)
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
            self._complete(model, load)
