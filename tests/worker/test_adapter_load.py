"""The bytes of an adapter on their way: lent before it has its memory, copied then, or given back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
import torch

from hearth.config import EngineConfig
from hearth.errors import StoreError
from hearth.memory.arena import ArenaPool
from hearth.models.layout import ByteRange
from hearth.store.borrower import Borrower
from hearth.store.lender import Lender
from hearth.store.loader import Loader
from hearth.store.manifest import WEIGHTS
from hearth.store.tiers import Tiers
from hearth.worker import adapter_load
from hearth.worker.adapter_load import AdapterBroken, AdapterFilled, AdapterLoad, AdapterNews
from hearth.worker.runtime import HostingResources
from tests.store.stored import PATIENCE_S, tiers_at, until
from tests.worker.stored_adapters import stored_adapter

CPU = torch.device("cpu")


@dataclass
class Road:
    """A keeper that has an adapter in host memory, and a worker to which it may come. Mutable."""

    tiers: Tiers
    resources: HostingResources
    news: SimpleQueue[AdapterNews]

    def __post_init__(self) -> None:
        self.stored = stored_adapter("llama-gqa")
        self.borrowed = self.resources.borrower.open_adapter(self.stored.order.where)
        self.pieces = [
            torch.zeros(part.end - part.begin, dtype=torch.uint8) for _, part in self.stored.layout.layers
        ]

    def begin(self) -> AdapterLoad:
        return AdapterLoad(
            *(self.stored.order, self.borrowed, self.resources), lambda _, news: self.news.put(news)
        )

    def told(self) -> AdapterNews:
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
        closing(Lender(tiers, tmp_path / "s")),
        closing(Borrower(tmp_path / "s", is_pinned=False)) as borrower,
    ):
        resources = HostingResources(
            CPU, EngineConfig(), lambda terms: ArenaPool(CPU, 1 << 20, terms), borrower, Loader(CPU)
        )
        yield Road(tiers, resources, SimpleQueue())


@pytest.mark.parametrize("max_short", [0, 1000])
def test_an_adapter_is_lent_before_it_has_its_memory_and_there_when_it_is_told(
    road: Road, max_short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_load, "MAX_SHORT_CHUNKS", max_short)
    load = road.begin()
    until(lambda: road.num_leased > 0)
    num_prepared: list[int] = []
    load.fill(road.pieces, lambda: num_prepared.append(road.num_leased))
    assert isinstance(told := road.told(), AdapterFilled)
    assert road.is_there()
    assert told.record.num_bytes == road.stored.layout.num_bytes
    assert len(num_prepared) == 1
    until(lambda: road.num_leased == 0)


def test_an_adapter_that_has_no_room_is_given_back_and_nothing_is_said(road: Road) -> None:
    for _ in range(3):
        load = road.begin()
        load.call_off()
    until(lambda: road.num_leased == 0)
    with pytest.raises(Empty):
        road.news.get(timeout=0.05)
    load = road.begin()
    load.fill(road.pieces, lambda: None)
    assert isinstance(road.told(), AdapterFilled)


def test_memory_that_cannot_be_prepared_breaks_the_load_alone(road: Road) -> None:
    def refuse() -> None:
        raise StoreError("no such page")

    load = road.begin()
    load.fill(road.pieces, refuse)
    assert isinstance(told := road.told(), AdapterBroken)
    assert told.failure.reason == "no such page"
    until(lambda: road.num_leased == 0)


def test_a_keeper_that_does_not_lend_is_told_of_only_if_there_is_room(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, is_given_up: object) -> None:
        raise StoreError("it was removed")

    monkeypatch.setattr(adapter_load, "PatientLoan", refuse)
    road.begin().call_off()
    time.sleep(0.02)  # as long as it takes to be refused
    load = road.begin()
    load.fill(road.pieces, lambda: pytest.fail("nothing is to be written"))
    assert isinstance(told := road.told(), AdapterBroken)
    assert told.failure.reason == "it was removed"
    assert road.news.empty()
