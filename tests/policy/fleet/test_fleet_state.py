"""A fleet that was saved and restored is the same fleet, and decides as the saved one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import BrainConfig, Scaling
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.fleet_state import FleetState, restore, save
from hearth.policy.fleet.ranking import Ranking, SizedRanking
from hearth.policy.fleet.records import Drain, Model, Replica, Request, Worker
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, Moves, played

#: `Expiries`, `patient` and `reserving` may have entries that are out of date, and a drain may be looked at
#: once more; victims that have left do not count. GPU time is counted from the restoration on.
NOT_COMPARED = {
    "gpu_time",
    *("expiries", "expiry_entry_s", "_newly_queued", "patient", "reserving", "victims"),
    *("changed_drains", "done_drains", "_drains_by_model"),
}


def encoded(fleet: Fleet) -> FleetState:
    """The state of a fleet, by way of JSON."""
    return msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(save(fleet)))), FleetState)


@given(CONFIGS, LONG_LIVES, st.integers(0, 200), st.booleans())
def test_a_restored_fleet_is_the_same_and_decides_the_same(
    config: BrainConfig, moves: Moves, num_before: int, scales: bool
) -> None:
    config = replace(config, scaling=Scaling(1.0, 3.0, 1) if scales else None)
    world = played(config, moves)
    fleet = Fleet(config)
    for event in world.events[:num_before]:
        step(fleet, event)
    restored = restore(config, encoded(fleet))
    assert list(values(restored)) == list(values(fleet))
    audit(restored)
    for event, actions in list(zip(world.events, world.actions, strict=True))[num_before:]:
        assert step(restored, event) == actions


def values(value: object, seen: set[int] | None = None, path: str = "fleet") -> Iterator[tuple[str, object]]:
    """Yield every value that a fleet holds, by its path; of records that were seen before only the name."""
    seen = set() if seen is None else seen
    if isinstance(value, Request | Model | Replica | Worker | Drain):
        yield path, type(value).__name__
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, dict):
        in_order = (
            {}
            if any(isinstance(key, Replica) for key in value)
            else dict(sorted(value.items(), key=lambda item: str(item[0])))
        )
        for key, held in in_order.items():
            yield from values(held, seen, f"{path}[{key}]")
        yield f"len({path})", len(value)
    elif isinstance(value, list | tuple):
        for at, held in enumerate(value):
            yield from values(held, seen, f"{path}[{at}]")
    elif is_dataclass(value) or type(value).__module__.startswith("hearth.policy"):
        for name in names(value):
            if name not in NOT_COMPARED:
                yield from values(getattr(value, name), seen, f"{path}.{name}")
    else:
        yield path, value


def names(value: object) -> list[str]:
    if isinstance(value, Ranking):
        return ["_ranked"]
    if isinstance(value, SizedRanking):
        return ["_by_class"]
    return [one.name for one in fields(value)] if is_dataclass(value) else list(vars(value))
