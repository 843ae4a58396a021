"""Which of the models that wait for room may get or reserve some now. No others are looked at."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from hearth.core.types import ModelId
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Model, Place
from hearth.policy.fleet.reserved_workers import ReservedWorkers

#: Models that reserve room, and models that are looked at behind those that reserve all room.
MAX_RESERVING = MAX_BEHIND = 8
FIRST_PLACE = Place(-math.inf, 0)


@dataclass(slots=True)
class RoomCandidates:
    """Models in order of arrival. Mutable; used by `serving.py` within a step.

    These are models whose drain may have given room, the first `MAX_RESERVING` that still reserve room, and
    models that are small enough for the room there is. Behind models that reserve all room come
    `MAX_BEHIND` more: resting workers may have room for them.
    """

    fleet: Fleet
    reserved: ReservedWorkers
    place: Place = FIRST_PLACE  #: the next model is here or behind
    num_reserving: int = 0
    num_behind: int = 0
    #: Models of this size have no room as long as there are so many drains: a smaller one had none.
    too_many_bytes: int = sys.maxsize
    num_drains: int = 0

    def next(self) -> Model | None:
        if not len(self.fleet.queues.for_room):
            return None
        self.fleet.queues.rank_waiting()
        has_all_kinds = self.reserved.has_all_kinds
        if (has_all_kinds and not self.fleet.resting) or self.num_behind > MAX_BEHIND:
            return None
        if len(self.fleet.drains) != self.num_drains:  # One that ended gives its worker back to all.
            self.num_drains, self.too_many_bytes = len(self.fleet.drains), sys.maxsize
        self.reserved.add_drained(before=self.place)
        line = self.fleet.queues.for_room
        names = self._find(has_all_kinds=has_all_kinds)
        found = [(place, name) for name in names if (place := line.rank(name)) is not None]
        if not found:
            return None
        place, name = min(found)
        self.num_reserving += name in self.fleet.queues.reserving
        self.place = place._replace(number=place.number + 1)
        self.reserved.add_drained(before=place)
        return self.fleet.models[name]

    def pass_over(self, model: Model) -> None:
        """Take a model that got no room as a sign that larger ones get none."""
        assert model.profile is not None, f"removed: `{model.name}`"
        footprints = model.profile.footprints
        # Room on its own workers would not help it, and what models keep out of turn is no matter of size.
        if not model.replicas and not self.fleet.config.takes_turns:
            kinds = self.fleet.capacity.by_kind
            if all(kind in footprints for kind in kinds):
                size = max((footprints[kind].least_bytes for kind in kinds), default=0)
                self.too_many_bytes = min(self.too_many_bytes, size)

    def count_behind(self) -> None:
        self.num_behind += self.reserved.has_all

    def _find(self, *, has_all_kinds: bool) -> Iterator[ModelId]:
        queues, reserved = self.fleet.queues, self.reserved
        if has_all_kinds or (
            len(reserved.drains) >= len(self.fleet.workers) and not reserved.has_all_drained
        ):
            if (name := queues.for_room.first_from_rank(self.place)) is not None:
                yield name
            return
        yield from (name for name, one in queues.done_drains.items() if self._is_ahead(one.model))
        if self.num_reserving < MAX_RESERVING and (name := self._find_reserving()) is not None:
            yield name
            if name == queues.for_room.first_from_rank(self.place):
                return
        max_bytes = min(reserved.most_open_bytes(), self.too_many_bytes - 1)
        if (name := queues.for_room_by_size.find(self.place, max_bytes)) is not None:
            yield name

    def _is_ahead(self, model: Model) -> bool:
        return model.first_waiting is not None and model.first_waiting.place >= self.place

    def _find_reserving(self) -> ModelId | None:
        reserving = self.fleet.queues.reserving
        while (name := reserving.first_from_rank(self.place)) is not None:
            if keeps_room(self.fleet, self.fleet.models[name]):
                break
            reserving.drop(name)
        return name


def keeps_room(fleet: Fleet, model: Model) -> bool:
    return fleet.now_s < kept_until_s(fleet, model)


def kept_until_s(fleet: Fleet, model: Model) -> float:
    first = model.first_waiting
    assert first is not None, f"no request waits for `{model.name}`"
    return first.overdue_s(fleet.config.patience_s) + fleet.config.max_drain_s
