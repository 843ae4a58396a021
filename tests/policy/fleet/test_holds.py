"""When replicas expire, and whose workers are told, against a search through all of them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.holds import Expiries, HoldNotices
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.records import Model, Replica, Worker
from tests.policy.fleet.world import profile

KEEP_ALIVE_S = 10.0
#: (which replica, its new hold, since when it is idle)
CHANGES = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.sampled_from(Hold), st.floats(0.0, 50.0)), max_size=30
)


def some_replicas() -> list[Replica]:
    worker = Worker(WorkerId("w"), "cuda", Promises(100))
    models = [Model(ModelId(name), profile(name, keep_alive_s=KEEP_ALIVE_S)) for name in "abcd"]
    return [Replica(model, worker, Promise(10, 0), 10, "", number=at) for at, model in enumerate(models)]


@given(CHANGES, st.floats(0.0, 80.0))
def test_every_warm_replica_expires_in_its_order_and_no_other(
    changes: list[tuple[int, Hold | None, float]], now_s: float
) -> None:
    expiries, replicas = Expiries(), some_replicas()
    for at, hold, idle_since_s in changes:
        replicas[at].hold, replicas[at].idle_since_s = hold, idle_since_s
        expiries.put(replicas[at])
    warm = [replica for replica in replicas if replica.hold is Hold.WARM]
    assert expiries.next_s(math.inf) == min((replica.expires_s for replica in warm), default=None)
    due = []
    while (replica := expiries.pop_due(now_s)) is not None:
        assert replica.hold is Hold.WARM
        due.append(replica)
        replica.hold = Hold.RETAINED
        expiries.put(replica)
    expired = [replica for replica in warm if replica.expires_s <= now_s]
    assert due == sorted(expired, key=lambda replica: (replica.expires_s, replica.number))
    rest_s = (replica.expires_s for replica in replicas if replica.hold is Hold.WARM)
    assert expiries.next_s(math.inf) == min(rest_s, default=None)
    assert expiries.next_s(now_s) is None


def test_a_replica_that_was_used_again_expires_after_those_that_were_not() -> None:
    expiries, (a, b, *_) = Expiries(), some_replicas()
    for replica, idle_since_s in ((a, 0.0), (b, 1.0), (a, 2.0)):
        replica.hold, replica.idle_since_s = Hold.WARM, idle_since_s
        expiries.put(replica)
    assert [expiries.pop_due(20.0), expiries.pop_due(20.0)] == [b, a]


@given(CHANGES)
def test_workers_are_told_of_each_change_once_and_never_who_is_busy(
    changes: list[tuple[int, Hold | None, float]],
) -> None:
    notices, replicas = HoldNotices(), some_replicas()
    for at, hold, _ in changes:
        replicas[at].hold = hold
        notices.put(replicas[at])
    due = [one for one in replicas if one.hold in (Hold.RETAINED, Hold.PINNED)]  # All begin as warm ones.
    taken = notices.take()
    assert set(taken) == set(due)
    assert len(taken) == len(due)
    assert all(one.notified_hold is one.hold for one in due)
    for one in replicas:
        notices.put(one)
    assert notices.take() == []
