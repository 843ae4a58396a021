"""Whether the KV of requests that leave a pipeline goes with them, or is computed again. Pure.

What is sooner by measured speed is done: the bytes of all layers over the links from the members, behind what
the requests before it send over the same links, or the prompt on the new worker, behind the prompts of those
that are computed there. The brain knows no tokens of answers: they are taken to be few, and cost either way.

A request waits for its KV for as long as computing it would take, or for `MIN_WAIT_S` if that is longer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from hearth.core.types import NodeId, WorkerId
from hearth.policy.fleet.events import Dispatch, MoveKv
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Replica

#: Until the members of a pipeline have been told and are connected.
SETUP_S = 0.005
MIN_WAIT_S = 0.1
#: Of one switch: meanwhile it takes as much host memory of senders and of receivers.
MAX_MOVED_BYTES = 4 << 30


def choose_kv_moves(fleet: Fleet, pipeline: Replica, dispatches: Iterable[Dispatch]) -> list[MoveKv]:
    """Return a choice for each request that goes on where the whole model is, if the cost is known."""
    sent_bytes: dict[tuple[NodeId, NodeId], int] = defaultdict(int)
    computed_tokens: dict[WorkerId, int] = defaultdict(int)
    left_bytes = MAX_MOVED_BYTES
    choices: list[MoveKv] = []
    for one in dispatches:
        request, target = fleet.queues.requests[one.request_id], fleet.workers[one.worker]
        replica, profile = target.replicas[one.model], request.model.profile
        footprint = None if profile is None else profile.footprints.get(target.kind)
        if footprint is None or not footprint.kv_token_bytes or not target.runs_stages:
            continue
        if replica.stages or not replica.is_ready:
            continue
        num_tokens = request.num_prompt_tokens
        num_bytes, num_layers = num_tokens * footprint.kv_token_bytes, pipeline.stages[-1].end
        sends: dict[tuple[NodeId, NodeId], int] = defaultdict(int)
        for stage in pipeline.stages:
            sends[stage.worker.node, target.node] += num_bytes * (stage.end - stage.begin) // num_layers
        move_s = SETUP_S + max(
            fleet.estimates.kv_s(*link, sent_bytes[link] + part_bytes) for link, part_bytes in sends.items()
        )
        prompt_s = fleet.estimates.prompt_s(request.model.name, computed_tokens[one.worker] + num_tokens)
        senders = tuple(worker.name for worker in pipeline.workers)
        wait_s = max(MIN_WAIT_S, prompt_s)
        choice = MoveKv(
            one.request_id,
            pipeline.model.name,
            senders,
            one.worker,
            num_bytes,
            None if math.isinf(move_s) else move_s,
            prompt_s,
            wait_s,
            is_moved=move_s < prompt_s and num_bytes <= left_bytes,
        )
        choices.append(choice)
        if choice.is_moved:
            left_bytes -= num_bytes
            for link, part_bytes in sends.items():
                sent_bytes[link] += part_bytes
        else:
            computed_tokens[one.worker] += num_tokens
    return choices
