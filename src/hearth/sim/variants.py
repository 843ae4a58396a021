"""Settings to compare with: Hearth without one of its mechanisms, and simpler systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hearth.sim.setting import Policy, SimulationSetting

OWN = "Hearth"


def variants(setting: SimulationSetting) -> Mapping[str, SimulationSetting]:
    """Return the setting itself, without each mechanism that it has, and as simpler systems would run it.

    - LRU: models share devices, and that of the last use longest ago leaves.
    - one model per GPU: as Hearth, but no device has two models.
    - keep-alive: a device has one model, whose weights leave when it was idle for `keep_alive_s`.
    - static: each model has a device all the time, and keeps all further ones that it ever needed.
    """
    found = {OWN: setting}
    if setting.prewarming is not None:
        found["without pre-warming"] = replace(setting, prewarming=None)
    if setting.policy is Policy.TURNS:
        found["without turns"] = replace(setting, policy=Policy.DRAIN)
    found["without reuse of weights"] = replace(setting, frees_idle=True)
    if setting.num_nodes > 1 and setting.transfers.disk_bytes_per_s is not None:
        alone = replace(setting.transfers, uses_peers=False)
        found["without peers and multicast"] = replace(setting, transfers=alone)
    if setting.may_drop:
        found["without drop"] = replace(setting, may_drop=False)
    simple = replace(setting, prewarming=None, may_drop=False, policy=Policy.DRAIN)
    exclusive = replace(simple, is_exclusive=True)
    return {
        **found,
        "LRU": replace(simple, evicts_by_last_use=True),
        "one model per GPU": exclusive,
        "keep-alive": replace(exclusive, frees_idle=True),
        "static": replace(exclusive, is_static=True),
    }
