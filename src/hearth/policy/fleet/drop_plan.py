"""Which replicas of a model become groups that have its layers once, so that the rest is memory for KV. Pure.

The two smallest groups are merged until what they free covers the demand. A group of n replicas frees n - 1
copies of the weights. Its size divides the layers, so that all members have the same memory for KV.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.pipelines import PipelinePlan, plan_stages
from hearth.policy.fleet.profile import MAX_STAGES, Footprint, ModelProfile, StageSizes
from hearth.policy.fleet.records import Model, Replica, Worker

#: Groups must have room for so many times the KV of the replicas: forming them costs a pause.
MIN_GAIN = 1.1
#: A burst has just begun when it is noticed: so many times as much is freed as it lacks then.
GROWTH = 3.0


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    replicas: tuple[Replica, ...]  #: that become its members
    pipeline: PipelinePlan
    kv_share: float  #: its room for KV, over that of a replica


def merge_groups(num_replicas: int, num_copies: int, num_layers: int) -> list[int]:
    """Return the sizes of groups, the smallest first, that free `num_copies` copies, or as many as can be."""
    sizes = [1] * num_replicas
    while num_replicas - len(sizes) < num_copies:
        pairs = sorted(combinations(sorted(sizes), 2), key=sum)
        merged = next((pair for pair in pairs if _may_have(sum(pair), num_layers)), None)
        if merged is None:
            break
        for size in merged:
            sizes.remove(size)
        sizes.append(sum(merged))
    return sorted(sizes)


def _may_have(size: int, num_layers: int) -> bool:
    return size <= min(MAX_STAGES, num_layers) and num_layers % size == 0


def plan_drop(fleet: Fleet, model: Model, profile: ModelProfile) -> list[DroppedGroup]:
    """Return groups that free what a model lacks, or as much as can be; empty: they would gain too little."""
    replicas = _candidates(model, profile)
    if len(replicas) < 2:
        return []
    kind = replicas[0].worker.kind
    sizes, footprint = profile.stages[kind], profile.footprints[kind]
    if not footprint.kv_token_bytes:
        return []
    usable = model.usable.values()
    lack_tokens = sum(one.demand_tokens for one in usable) - sum(one.room_tokens for one in usable)
    num_copies = math.ceil(GROWTH * lack_tokens * footprint.kv_token_bytes / footprint.weights_bytes)
    group_sizes = merge_groups(len(replicas), max(1, num_copies), sizes.num_layers)
    num_freed = len(replicas) - len(group_sizes)
    more_tokens = num_freed * footprint.weights_bytes // footprint.kv_token_bytes
    if not _gains(replicas, len(group_sizes), footprint.max_seqs, more_tokens):
        return []
    if not _pays_off(fleet, model, replicas, lack_tokens, more_tokens):
        return []
    left = iter(replicas)
    groups = [tuple(islice(left, size)) for size in reversed(group_sizes) if size > 1]
    return [group for one in groups if (group := _group(sizes, footprint, one)) is not None]


def _candidates(model: Model, profile: ModelProfile) -> list[Replica]:
    """Return the whole replicas that could be stages, of the kind of worker that has most, by node."""
    by_kind = defaultdict[str, list[Replica]](list)
    for replica in model.usable.values():
        worker = replica.worker
        may_stage = worker.runs_stages and worker.kind in profile.stages
        is_serving = replica.is_ready and replica.is_in_turn and not replica.stages
        if may_stage and is_serving and worker.drain is None:
            by_kind[worker.kind].append(replica)
    most = max(by_kind.values(), key=len, default=[])
    return sorted(most, key=lambda one: (one.worker.node, one.worker.name))


def _pays_off(
    fleet: Fleet, model: Model, replicas: Sequence[Replica], lack_tokens: int, more_tokens: int
) -> bool:
    """True if requests wait less for KV by more than groups take to compute again what runs.

    KV comes free as requests end. Of what is lacking, groups have `more_tokens` at once, and the rest comes
    free as part of more KV. Their members share what is computed; prompts that wait are computed either way.
    """
    room_tokens = sum(one.room_tokens for one in replicas)
    left_tokens = max(0, lack_tokens - more_tokens)
    waits = lack_tokens / room_tokens - left_tokens / (room_tokens + more_tokens)
    computed_s = fleet.estimates.least_prompt_s(model.name, math.ceil(room_tokens / len(replicas)))
    return waits * fleet.estimates.run_s(model.name) > computed_s


def _gains(replicas: Sequence[Replica], num_groups: int, max_seqs: int, more_tokens: int) -> bool:
    """False if groups have little more room for KV, or too few slots to use it."""
    room_tokens = sum(one.room_tokens for one in replicas)
    most_tokens = room_tokens + more_tokens
    num_running = sum(len(one.running) for one in replicas)
    if num_running:
        demand_tokens = sum(one.demand_tokens for one in replicas)
        most_tokens = min(most_tokens, num_groups * max_seqs * demand_tokens // num_running)
    return most_tokens >= MIN_GAIN * room_tokens


def _group(sizes: StageSizes, whole: Footprint, replicas: Sequence[Replica]) -> DroppedGroup | None:
    """Return a group of replicas; None: a worker has promised what it would need to other models."""
    replicas = tuple(sorted(replicas, key=lambda one: one.worker.name))
    shares = [sizes.num_layers // len(replicas)] * len(replicas)
    stages = plan_stages(sizes, [one.worker for one in replicas], shares)
    for replica, stage in zip(replicas, stages, strict=True):
        if not has_room_for(stage.footprint, replica, replica.worker):
            return None
    room_tokens, num_copies = sum(one.room_tokens for one in replicas), len(replicas) - 1
    more_tokens = num_copies * whole.weights_bytes // whole.kv_token_bytes
    kv_share = len(replicas) * (1.0 + more_tokens / room_tokens)
    return DroppedGroup(replicas, PipelinePlan(stages, (), sizes.context_blocks), kv_share)


def has_room_for(footprint: Footprint, replica: Replica, worker: Worker) -> bool:
    """True if a worker has room for a footprint in place of what a replica has there."""
    promises = worker.promises.copy()
    promises.release(replica.promise_on(worker), replica.booked_hold)
    return promises.has_room(footprint)


def restorable(replica: Replica, profile: ModelProfile) -> Iterator[Worker]:
    """Yield the members of a group that have room for the whole model in its place."""
    for worker in replica.workers:
        footprint = profile.footprints.get(worker.kind)
        if footprint is not None and has_room_for(footprint, replica, worker):
            yield worker
