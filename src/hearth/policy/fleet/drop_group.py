"""When the replicas of a model give up layers for KV, and when they have them back. Pure.

    whole  --- pressure --->  preparing  --- all stages ready --->  dropped
      ^  ^                     |      ^------- pressure again -------|   |
      |  '------ no group left ---'------------- no group left ------'   |
      '--- all whole again ---  restoring  <--- relief for `hold_s` -----'

A group of replicas becomes a pipeline of which each member keeps some layers, so that a group has the model
once. The epoch of a group is the name of its pipeline, which is never used again: every step carries it. A
group that loses a member is dissolved in any state, and its requests run on what is left or loaded again.

A restore that is followed by a drop soon was a mistake: then the next one waits for twice as long. So a load
that comes and goes does not have the layers come and go with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

#: Relief is a demand of at most this share of what the whole replicas had room for.
RELIEF = 0.5
#: How long relief must last before a restore, and at most after several drops in a row.
HOLD_S, MAX_HOLD_S = 10.0, 320.0


class DropState(StrEnum):
    WHOLE = "whole"
    PREPARING = "preparing"  #: the stages of groups are being loaded; requests wait for them
    DROPPED = "dropped"  #: groups serve
    RESTORING = "restoring"  #: whole replicas are being loaded; requests wait for them


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups and whole replicas of a model at a moment."""

    num_groups: int
    num_ready: int  #: of these
    num_loading: int  #: whole replicas
    demand_tokens: int  #: of KV, a second from now
    room_tokens: int  #: of whole replicas, that they have, or had before they became groups


@dataclass(slots=True)
class ParameterDrop:
    """The state of one model. Mutable; the brain writes it."""

    state: DropState = DropState.WHOLE
    hold_s: float = HOLD_S
    relieved_s: float = math.inf  #: since when there is relief; infinite: there is none
    restored_s: float = -math.inf  #: when the last restore was
    blocked_until_s: float = -math.inf  #: a group has failed: none is formed before

    @property
    def due_s(self) -> float:
        """When to ask `may_restore` again, if nothing happens before."""
        return self.relieved_s + self.hold_s if self.state is DropState.DROPPED else math.inf

    def may_drop(self, groups: Groups, now_s: float) -> bool:
        is_settled = self.state in (DropState.WHOLE, DropState.DROPPED) and now_s >= self.blocked_until_s
        return is_settled and groups.demand_tokens > groups.room_tokens

    def drop(self, now_s: float) -> None:
        """Note that groups were formed, perhaps beside others."""
        assert self.state in (DropState.WHOLE, DropState.DROPPED), f"dropped while {self.state}"
        if self.state is DropState.WHOLE:
            was_mistaken = now_s - self.restored_s < 2 * self.hold_s
            self.hold_s = min(MAX_HOLD_S, 2 * self.hold_s) if was_mistaken else HOLD_S
        self.state, self.relieved_s = DropState.PREPARING, math.inf

    def observe(self, groups: Groups, now_s: float) -> None:
        """Follow what has become of the groups, and of the whole replicas that they were restored to."""
        match self.state:
            case DropState.PREPARING | DropState.DROPPED if not groups.num_groups:
                self.state = DropState.WHOLE
            case DropState.PREPARING if groups.num_ready == groups.num_groups:
                self.state = DropState.DROPPED
            case DropState.RESTORING if not groups.num_loading:
                self.state = DropState.WHOLE
        is_relieved = groups.demand_tokens <= RELIEF * groups.room_tokens
        if self.state is not DropState.DROPPED or not is_relieved:
            self.relieved_s = math.inf
        else:
            self.relieved_s = min(self.relieved_s, now_s)

    def may_restore(self, now_s: float) -> bool:
        return now_s >= self.due_s

    def restore(self, now_s: float) -> None:
        """Note that groups are dissolved, and whole replicas loaded instead."""
        assert self.state is DropState.DROPPED, f"restored while {self.state}"
        self.state, self.restored_s, self.relieved_s = DropState.RESTORING, now_s, math.inf

    def fail(self, now_s: float) -> None:
        """Note that a group has failed, not just lost a member."""
        self.blocked_until_s = now_s + MAX_HOLD_S
