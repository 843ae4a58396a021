"""The bytes of an adapter on their way to its memory, by one thread or by several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import DeviceError, StoreError
from hearth.memory.arena import ArenaPool
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import WEIGHTS
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer import lease_client as lease_clients
from hearth.store.transfer.copies import SingleCopies
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient, LeaseRequest
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from hearth.worker import adapter_load
from hearth.worker.adapter_load import (
    AdapterBroken,
    AdapterFilled,
    AdapterNews,
    adapter_lease,
    load_adapter,
)
from hearth.worker.runtime import HostingResources
from tests.store.stored import PATIENCE_S, tiers_at, until
from tests.worker.stored_adapters import run_in, stored_adapter

CPU = torch.device("cpu")


@dataclass
class Road:
    """A keeper that has an adapter in host memory, and a worker to which it may come. Mutable."""

    tiers: Tiers
    resources: HostingResources
    news: SimpleQueue[AdapterNews]

    def __post_init__(self) -> None:
        self.stored = stored_adapter("llama-gqa")
        self.opened = self.resources.lease_client.open_adapter(self.stored.order.where)
        *first, last = (part.end - part.begin for _, part in self.stored.layout.layers)
        #: All layers but the last one behind the other.
        self.runs = [run_in(torch.zeros(sum(sizes), dtype=torch.uint8), *sizes) for sizes in (first, [last])]
        self.pieces = [piece for run in self.runs for piece in run.split()]

    def lease(self) -> Lease:
        return adapter_lease(self.opened, self.resources)

    def requested(self) -> Lease:
        """Return a lease that the keeper was asked for."""
        lease = self.lease()
        assert lease.request()
        return lease

    def load(self, prepare: Callable[[], None] = lambda: None, lease: Lease | None = None) -> AdapterNews:
        """Have the adapter come; return what is told of it."""
        load_adapter(
            self.stored.order,
            self.opened,
            lease or self.lease(),
            self.runs,
            prepare,
            self.resources,
            lambda _, news: self.news.put(news),
        )
        return self.news.get(timeout=PATIENCE_S)

    def is_there(self) -> bool:
        content = (Path(self.stored.order.where) / WEIGHTS).read_bytes()
        parts: list[ByteRange] = [part for _, part in self.stored.layout.layers]
        return [piece.numpy().tobytes() for piece in self.pieces] == [
            content[part.begin : part.end] for part in parts
        ]

    @property
    def num_leased(self) -> int:
        return self.tiers.fetcher.book.num_leased


@pytest.fixture
def road(tmp_path: Path) -> Iterator[Road]:
    with (
        tiers_at(tmp_path / "tiers", num_cells=64) as tiers,
        closing(LeaseServer(tiers, tmp_path / "s")),
        closing(LeaseClient(tmp_path / "s", is_pinned=False)) as lease_client,
    ):
        resources = HostingResources(
            CPU, EngineConfig(), lambda terms: ArenaPool(CPU, 1 << 20, terms), lease_client, Loader(CPU)
        )
        yield Road(tiers, resources, SimpleQueue())


@pytest.mark.parametrize("max_short", [0, 1000])
def test_an_adapter_is_there_when_it_is_told(
    road: Road, max_short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_load, "MAX_RUN_CHUNKS", max_short)
    for _ in range(2):  # from disk, and from host memory
        for piece in road.pieces:
            piece.zero_()
        assert isinstance(told := road.load(), AdapterFilled)
        assert road.is_there()
        assert told.record.num_bytes == road.stored.layout.num_bytes
        until(lambda: road.num_leased == 0)
    assert road.news.empty()


def test_pieces_side_by_side_are_one_copy_if_they_are_so_in_the_file() -> None:
    memory = torch.zeros(50, dtype=torch.uint8)
    runs = [run_in(memory[:20], 10, 10), run_in(memory[30:50], 10, 10)]
    parts = [ByteRange(0, 10), ByteRange(10, 20), ByteRange(20, 30), ByteRange(32, 42)]

    pieces = adapter_load._load_pieces(list(enumerate(parts)), runs)

    assert [piece.part for piece in pieces] == [ByteRange(0, 20), ByteRange(20, 30), ByteRange(32, 42)]
    assert [piece.address - memory.data_ptr() for piece in pieces] == [0, 30, 40]


@pytest.mark.parametrize("max_short", [0, 1000])
def test_an_adapter_that_was_asked_for_ahead_is_not_asked_for_again(
    road: Road, max_short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_load, "MAX_RUN_CHUNKS", max_short)
    lease = road.requested()
    until(lambda: road.num_leased > 0)

    with monkeypatch.context() as silent:
        silent.setattr(lease_clients, "_answer", lambda *_: pytest.fail("it was asked for already"))
        assert isinstance(road.load(lease=lease), AdapterFilled)

    assert road.is_there()
    until(lambda: road.num_leased == 0)


def test_what_was_asked_for_goes_back_if_its_memory_cannot_be_prepared(road: Road) -> None:
    def refuse() -> None:
        raise StoreError("no such page")

    assert isinstance(road.load(refuse, road.requested()), AdapterBroken)
    until(lambda: road.num_leased == 0)


def test_a_load_that_breaks_after_its_chunks_went_back_leaves_its_line_to_the_next(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("out of order")

    lease = road.requested()
    assert isinstance(asked := lease.state, LeaseRequest)
    with monkeypatch.context() as broken:
        broken.setattr(SingleCopies, "close", refuse)
        assert isinstance(road.load(lease=lease), AdapterFilled)
        assert isinstance(road.news.get(timeout=PATIENCE_S), AdapterBroken)

    again = road.requested()
    assert isinstance(again.state, LeaseRequest)
    assert again.state.connection is asked.connection
    assert again.state.connection.read() is not None, "the load has closed it"
    again.cancel()


def test_memory_that_cannot_be_prepared_breaks_the_load_alone(road: Road) -> None:
    def refuse() -> None:
        raise StoreError("no such page")

    assert isinstance(told := road.load(refuse), AdapterBroken)
    assert told.failure.reason == "no such page"
    assert isinstance(road.load(), AdapterFilled)


def test_a_copy_that_the_device_refuses_breaks_the_load_and_all_is_given_back(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError("out of order")

    with monkeypatch.context() as broken:
        broken.setattr(SingleCopies, "queue", refuse)
        assert isinstance(told := road.load(), AdapterBroken)
    assert told.failure.reason == "out of order"
    until(lambda: road.num_leased == 0)
    assert isinstance(road.load(), AdapterFilled)
    assert road.is_there()
