"""What is known of device memory, after any reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.device_bytes import (
    count_missing_bytes,
    forget_model,
    forget_worker,
    free_retired,
    rank_retired,
    record_report,
)
from hearth.policy.fleet.events import Evict
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.records import Model, Replica, Worker
from tests.policy.fleet.world import profile

TOTAL_BYTES = 30
A, B, GONE = ModelId("a"), ModelId("b"), ModelId("gone")
REPORTS = st.lists(
    st.tuples(
        st.sampled_from(["w0", "w1"]), st.dictionaries(st.sampled_from([A, B, GONE]), st.integers(0, 50))
    )
)
HOSTS = st.sets(st.tuples(st.sampled_from(["w0", "w1"]), st.sampled_from([A, B])))


class Books:
    """Two models and two workers, some of which host some."""

    def __init__(self, hosts: set[tuple[str, ModelId]]) -> None:
        self.models = {name: Model(name, profile(name, TOTAL_BYTES)) for name in (A, B)}
        names = [WorkerId("w0"), WorkerId("w1")]
        self.workers = {name: Worker(name, "cuda", Promises(100)) for name in names}
        for worker_name, model_name in sorted(hosts):
            model, worker = self.models[model_name], self.workers[WorkerId(worker_name)]
            replica = Replica(model, worker, Promise(35, 0), TOTAL_BYTES, "", is_ready=True)
            model.replicas[worker.name] = worker.replicas[model.name] = replica
            rank_retired(model, worker)

    def check(self, last: dict[str, dict[ModelId, int]]) -> None:
        """`last`: what each worker said last."""
        for name, model in self.models.items():
            said = {worker: min(last.get(worker, {}).get(name, 0), TOTAL_BYTES) for worker in self.workers}
            assert model.resident_bytes == {worker: num for worker, num in said.items() if num}
            ranks = {worker: model.retired.rank(worker) for worker in model.retired}
            assert ranks == {w: num for w, num in model.resident_bytes.items() if w not in model.replicas}
            for worker in self.workers.values():
                assert (name in worker.resident_models) == (worker.name in model.resident_bytes)
                assert count_missing_bytes(model, worker) == TOTAL_BYTES - said[worker.name]


@given(HOSTS, REPORTS)
def test_the_last_report_of_each_worker_counts(
    hosts: set[tuple[str, ModelId]], reports: list[tuple[str, dict[ModelId, int]]]
) -> None:
    books, last = Books(hosts), {}
    for name, bytes_by_model in reports:
        record_report(books.models, books.workers[WorkerId(name)], bytes_by_model)
        last[name] = bytes_by_model
        books.check(last)
    for name in list(last):
        forget_worker(books.workers[WorkerId(name)])
        del last[name]
        books.check(last)


@given(HOSTS, REPORTS)
def test_freeing_what_is_left_of_a_model_spares_its_replicas(
    hosts: set[tuple[str, ModelId]], reports: list[tuple[str, dict[ModelId, int]]]
) -> None:
    books = Books(hosts)
    for name, bytes_by_model in reports:
        record_report(books.models, books.workers[WorkerId(name)], bytes_by_model)
    model = books.models[A]
    retired = set(model.resident_bytes) - set(model.replicas)
    actions = free_retired(model, books.workers)
    assert {action.worker for action in actions if isinstance(action, Evict) and action.is_freed} == retired
    assert len(actions) == len(retired)
    assert set(model.resident_bytes) <= set(model.replicas)
    forget_model(model, books.workers)
    assert not model.resident_bytes
    assert all(A not in worker.resident_models for worker in books.workers.values())
