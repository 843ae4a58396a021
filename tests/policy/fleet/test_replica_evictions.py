"""Which idle replicas go for a model, over any worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.profile import Footprint, Promise
from hearth.policy.fleet.records import Model, Replica, Worker
from hearth.policy.fleet.replica_evictions import EvictionPlan, Victim, choose_fewest, plan_evictions
from hearth.policy.memory.reload_cost import ReloadCosts
from tests.policy.fleet.world import profile

REPLICAS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(Hold), st.integers(0, 3)), max_size=8)


def hosting(replicas: list[tuple[int, Hold, int]], spare_bytes: int) -> Worker:
    """A worker with so many bytes free beside replicas that are held so."""
    budget_bytes = spare_bytes + sum(num_bytes for num_bytes, _, _ in replicas)
    worker = Worker(WorkerId("w"), "cuda", Promises(budget_bytes))
    for at, (num_bytes, hold, _) in enumerate(replicas):
        model = Model(ModelId(f"m{at}"), profile(f"m{at}", num_bytes))
        promise = Promise(num_bytes, 0)
        replica = Replica(model, worker, promise, num_bytes, "", hold=hold)
        worker.replicas[model.name] = model.replicas[worker.name] = replica
        worker.promises.add(promise, hold)
    return worker


def idle_bytes(worker: Worker, *holds: Hold) -> int:
    return sum(replica.promise.own_bytes for replica in worker.replicas.values() if replica.hold in holds)


@given(REPLICAS, st.integers(0, 50), st.integers(0, 300))
def test_a_plan_makes_room_with_no_victim_too_many(
    replicas: list[tuple[int, Hold, int]], spare_bytes: int, need_bytes: int
) -> None:
    worker, footprint = hosting(replicas, spare_bytes), Footprint(need_bytes, 0, 0)
    estimates = Estimates(ReloadCosts())
    for at, (_, _, num_asked) in enumerate(replicas):
        for now_s in range(num_asked):
            estimates.reload.asked(ModelId(f"m{at}"), float(now_s))
    before = worker.promises.copy()
    plan = plan_evictions(worker, footprint, estimates, 10.0)
    assert worker.promises == before
    if spare_bytes + idle_bytes(worker, Hold.RETAINED, Hold.WARM) < need_bytes:
        assert plan is None
        return
    assert plan is not None
    check_plan(worker, plan, spare_bytes, need_bytes)


def check_plan(worker: Worker, plan: EvictionPlan, spare_bytes: int, need_bytes: int) -> None:
    sizes = [victim.replica.promise.own_bytes for victim in plan.victims]
    assert spare_bytes + sum(sizes) >= need_bytes
    assert all(spare_bytes + sum(sizes) - size < need_bytes for size in sizes)
    holds = {victim.replica.hold for victim in plan.victims}
    assert holds <= {Hold.RETAINED, Hold.WARM}
    if spare_bytes + idle_bytes(worker, Hold.RETAINED) >= need_bytes:
        assert Hold.WARM not in holds
    assert plan.evict_s == sum(victim.cost_s for victim in plan.victims) >= 0.0


@given(
    st.lists(st.tuples(st.just(10), st.just(Hold.WARM), st.integers(0, 9)), min_size=1, max_size=8), st.data()
)
def test_of_equal_sizes_the_cheapest_go(replicas: list[tuple[int, Hold, int]], data: st.DataObject) -> None:
    worker = hosting(replicas, 0)
    costs = [float(cost) for _, _, cost in replicas]
    victims = [
        Victim(one, cost, one.promise) for one, cost in zip(worker.replicas.values(), costs, strict=True)
    ]
    num_needed = data.draw(st.integers(0, len(replicas)))
    chosen = choose_fewest(
        worker.promises, victims, lambda left: left.has_room(Footprint(10 * num_needed, 0, 0))
    )
    assert sorted(victim.cost_s for victim in chosen) == sorted(costs)[:num_needed]
