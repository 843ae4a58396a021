"""When a further replica of a model pays, and how long an idle one is kept.

Little's law: requests leave a replica at the number of those that run over the mean time of one. So when a
replica that is started now is ready, the queue has grown by the requests that arrive meanwhile and shrunk by
those that leave. What is left of it is worth a further replica. Replicas that are loading already count from
when they are ready. After each start `serving.py` asks again, so a burst starts all that it needs at once.

A start also pays if no request waits, but those expected during it would take all slots of a replica.

Of the idle replicas of a model, the one used last is kept like that of any other model. The others are spare.
One is needed when more requests run at a time than the rest has slots for: by Markov's inequality, with a
probability of at most the mean number that runs over the number of slots. By as much its `keep_alive` is
shorter and its reload cost is less, so a burst leaves no memory occupied. It stays warm for some reloads at
least: if the load comes and goes, the replica does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.records import Model, Replica, Spare

MIN_RUN_S = 0.001
#: A spare replica stays warm for at least so many times as long as it takes to load; where requests are
#: packed on few replicas, for the second number.
MIN_RELOADS, MIN_PACKED_RELOADS = 10, 2


def pays_off(model: Model, estimates: Estimates, start_s: float, now_s: float) -> bool:
    """True if a further replica that takes `start_s` to start will have requests to run."""
    num_left = len(model.waiting) + estimates.expect_arrivals(model.name, now_s, start_s)
    num_left -= expect_ends(model, estimates, start_s, enough=num_left)
    if model.waiting:
        return num_left > 0.0
    num_free = sum(one.max_seqs - len(one.running) for one in model.usable.values())
    return num_left >= num_free + min(one.max_seqs for one in model.usable.values())


def expect_ends(model: Model, estimates: Estimates, ahead_s: float, enough: float = math.inf) -> float:
    """Return how many requests are expected to end within `ahead_s` seconds, or `enough`."""
    num_ends, run_s = 0.0, max(MIN_RUN_S, estimates.run_s(model.name))
    for replica in model.usable.values():
        serving_s = ahead_s if replica.is_ready else ahead_s - _missing_s(replica, estimates)
        if serving_s > 0.0:
            num_ends += len(replica.running) * serving_s / run_s
        if num_ends >= enough:
            break
    return num_ends


def price_spare(
    replica: Replica, others: Iterable[Replica], estimates: Estimates, now_s: float, *, is_packed: bool
) -> Spare:
    """Return how much a replica is needed beside others of its model, which stay."""
    model = replica.model
    num_slots = sum(one.max_seqs for one in others)
    need = min(1.0, estimates.expect_running(model.name, now_s) / num_slots)
    reload_s = estimates.load_s(replica.total_bytes, model, replica.worker.node)
    num_reloads = MIN_PACKED_RELOADS if is_packed else MIN_RELOADS
    return Spare(need, max(need * model.unpinned_s, num_reloads * reload_s))


def _missing_s(replica: Replica, estimates: Estimates) -> float:
    return estimates.load_s(replica.total_bytes - replica.loaded_bytes, replica.model, replica.worker.node)
