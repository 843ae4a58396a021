"""When the first token of a request is expected on a replica. Pure.

Slots do not show that first tokens are late: a replica with hundreds of slots takes a burst of long prompts
and computes them one after another. So the brain adds up how long a replica takes for the prompts that it was
sent, after its load. While that is within the target, requests go to the oldest replica, so that the others
become idle and can go. Beyond the target they go where the first token comes first. A further replica is
loaded if it comes there sooner by more than the target (`load_for_late` in `serving.py`). That bounds how
many replicas a burst starts: each must save as much time as a first token may take.

A replica whose KV is nearly full is expected to begin after the mean run time of a request. Until a prompt of
a model has been timed, none of its replicas counts as late.
"""

from __future__ import annotations

from collections.abc import Sequence

from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Replica, Request

#: Of the KV of a replica, for prompts; the rest is for the answers.
PROMPT_SHARE = 0.8


def expect_first_s(fleet: Fleet, request: Request, replica: Replica) -> float:
    """Return how long the first token of a request takes on a replica."""
    wait_s = max(0.0, replica.prompts_until_s - fleet.now_s)
    num_tokens = replica.num_prompt_tokens + request.num_prompt_tokens
    if replica.running and num_tokens > PROMPT_SHARE * replica.max_kv_tokens > 0.0:
        wait_s = max(wait_s, fleet.estimates.run_s(request.model.name))
    return wait_s + fleet.prompt_s(request, replica)


def expect_soonest_s(fleet: Fleet, request: Request) -> float | None:
    """Return how long the first token of a request takes on the best replica; None: none has a slot."""
    replicas = (request.model.replicas[name] for name in request.model.with_free_slot)
    free = (one for one in replicas if one.has_slot_for(request, fleet.now_s))
    return min((expect_first_s(fleet, request, replica) for replica in free), default=None)


def prefer_on_time(
    fleet: Fleet, request: Request, replicas: Sequence[Replica], target_s: float
) -> list[Replica]:
    """Return the replicas among which the routing cost decides.

    These are the pinned ones that are on time, which stay whatever they have to do; else the oldest one that
    is on time; else the one where the first token comes first.
    """
    first_s = {replica: expect_first_s(fleet, request, replica) for replica in replicas}
    on_time = [replica for replica in replicas if first_s[replica] <= target_s]
    if pinned := [replica for replica in on_time if replica.has_pin]:
        return pinned
    if on_time:
        return [min(on_time, key=lambda one: (fleet.prompt_s(request, one), one.number))]
    return [min(replicas, key=lambda one: (first_s[one], one.number))]
