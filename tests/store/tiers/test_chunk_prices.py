"""What chunks are worth to their tiers, on a clock of the test's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.core.types import ChunkId, Rung
from hearth.policy.memory.byte_eviction import Price
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S
from hearth.store.tiers.chunk_prices import ChunkPrices
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import RemoteModel
from tests.store import stored
from tests.store.stored import parts_of

A, B = parts_of(1, 4), parts_of(2, 4)
ELSEWHERE = RemoteModel("http://127.0.0.1:9/m")


class Clock:
    """Mutable; the test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def model_of(name: str, parts: Sequence[bytes]) -> StoredModel:
    return replace(stored.model_of(name, parts), directory=Path(name))


def chunk(model: StoredModel, index: int = 0) -> ChunkId:
    return model.manifest.chunk_ids[index]


def cost(price: Price) -> float:
    return price[0] if isinstance(price, tuple) else price


def test_a_chunk_of_no_known_model_is_worth_nothing() -> None:
    assert ChunkPrices().of_host_chunk(chunk(model_of("a", A))) == (0.0, 0)


def test_the_model_that_is_asked_for_more_often_is_worth_more() -> None:
    clock = Clock()
    prices, often, seldom = ChunkPrices(clock), model_of("often", A), model_of("seldom", B)
    for clock.now_s in (0.0, 1000.0, 2000.0, 3000.0):
        prices.load_began(often)
    prices.load_began(seldom)
    assert cost(prices.of_host_chunk(chunk(often))) > cost(prices.of_host_chunk(chunk(seldom))) > 0


def test_a_silent_model_loses_its_worth() -> None:
    clock = Clock()
    prices, model = ChunkPrices(clock), model_of("a", A)
    prices.load_began(model)
    fresh = cost(prices.of_host_chunk(chunk(model)))
    clock.now_s = 100_000.0
    assert 0 < cost(prices.of_host_chunk(chunk(model))) < fresh / 10


def test_of_chunks_that_cost_the_same_the_later_one_is_cheaper() -> None:
    prices, model = ChunkPrices(Clock()), model_of("a", A)
    prices.load_began(model)
    first, last = (prices.of_host_chunk(chunk(model, index)) for index in (0, 3))
    assert cost(first) == cost(last)
    assert last == (cost(last), -3)
    assert first == (cost(first), 0)


def test_a_shared_chunk_is_worth_what_it_is_worth_to_all() -> None:
    prices = ChunkPrices(Clock())
    alone, sharing = model_of("alone", A), model_of("sharing", [B[0], A[1]])
    prices.load_began(alone)
    single = cost(prices.of_host_chunk(chunk(alone, 1)))
    prices.load_began(sharing)
    assert cost(prices.of_host_chunk(chunk(alone, 1))) == 2 * single
    assert cost(prices.of_host_chunk(chunk(alone, 0))) == single


def test_a_weighty_model_is_worth_more() -> None:
    prices = ChunkPrices(Clock())
    plain, weighty = model_of("plain", A), replace(model_of("weighty", B), weight=3.0)
    prices.load_began(plain)
    prices.load_began(weighty)
    assert cost(prices.of_host_chunk(chunk(weighty))) == 3 * cost(prices.of_host_chunk(chunk(plain)))


def test_what_would_come_from_farther_away_is_worth_more() -> None:
    prices = ChunkPrices(Clock())
    local, remote = model_of("local", A), replace(model_of("remote", B), remote=ELSEWHERE)
    prices.load_began(local)
    prices.load_began(remote)
    ratio = cost(prices.of_host_chunk(chunk(remote))) / cost(prices.of_host_chunk(chunk(local)))
    assert ratio == pytest.approx(PRIOR_BYTES_PER_S[Rung.DISK] / PRIOR_BYTES_PER_S[Rung.OBJECT])
    assert prices.of_disk_chunk(chunk(remote)) == prices.of_host_chunk(chunk(remote))


def test_what_of_a_remote_model_is_on_disk_is_worth_as_little_as_a_local_one() -> None:
    local, remote = model_of("local", A), replace(model_of("remote", B), remote=ELSEWHERE)
    prices = ChunkPrices(Clock(), is_on_disk=lambda chunk_id: chunk_id == chunk(remote, 1))
    prices.load_began(local)
    prices.load_began(remote)
    assert prices.of_host_chunk(chunk(remote, 1)) == prices.of_host_chunk(chunk(local, 1))
    assert cost(prices.of_host_chunk(chunk(remote, 2))) > cost(prices.of_host_chunk(chunk(local, 2)))


def test_the_disk_may_be_asked_while_it_asks_for_prices_itself() -> None:
    model = model_of("a", A)

    def is_on_disk(chunk_id: ChunkId) -> bool:
        return prices.of_disk_chunk(chunk_id) is not None  # needs the lock of the prices, as the disk does

    prices = ChunkPrices(Clock(), is_on_disk=is_on_disk)
    prices.load_began(model)
    assert cost(prices.of_host_chunk(chunk(model))) > 0


def test_a_rung_that_shows_its_speed_changes_the_price() -> None:
    prices, model = ChunkPrices(Clock()), model_of("a", A)
    prices.load_began(model)
    before = cost(prices.of_host_chunk(chunk(model)))
    prices.moved(Rung.DISK, 1 << 30, seconds=(1 << 30) / (PRIOR_BYTES_PER_S[Rung.DISK] / 4))
    assert prices.bytes_per_s(Rung.DISK) == pytest.approx(PRIOR_BYTES_PER_S[Rung.DISK] / 4)
    assert cost(prices.of_host_chunk(chunk(model))) == pytest.approx(4 * before)


def test_what_a_forgotten_model_shares_keeps_the_others_price() -> None:
    prices = ChunkPrices(Clock())
    kept, gone = model_of("kept", A), model_of("gone", [A[0], B[1]])
    prices.load_began(kept)
    alone = prices.of_host_chunk(chunk(kept))
    prices.load_began(gone)
    prices.forget(gone.directory)
    assert prices.of_host_chunk(chunk(kept)) == alone
    assert prices.of_host_chunk(chunk(gone, 1)) == (0.0, 0)


def test_models_of_one_name_do_not_share_demand() -> None:
    clock = Clock()
    prices, often = ChunkPrices(clock), model_of("m", A)
    seldom = replace(model_of("m", B), directory=Path("elsewhere/m"))
    for clock.now_s in (0.0, 1000.0, 2000.0, 3000.0):
        prices.load_began(often)
    prices.load_began(seldom)
    assert cost(prices.of_host_chunk(chunk(often))) > cost(prices.of_host_chunk(chunk(seldom))) > 0


def test_what_a_model_held_before_it_was_replaced_is_worth_nothing() -> None:
    prices, old, new = ChunkPrices(Clock()), model_of("m", A), model_of("m", [A[0], B[1]])
    prices.load_began(old)
    alone = prices.of_host_chunk(chunk(old))
    prices.load_began(new)
    assert prices.of_host_chunk(chunk(old, 1)) == (0.0, 0)
    assert prices.of_host_chunk(chunk(new)) == alone


def test_a_model_stays_while_a_copy_of_it_is_left() -> None:
    prices, model = ChunkPrices(Clock()), model_of("m", A)
    copy = replace(model, directory=Path("copy"))
    prices.load_began(model)
    prices.load_began(copy)
    worth = prices.of_host_chunk(chunk(model))
    prices.forget(copy.directory)
    assert prices.of_host_chunk(chunk(model)) == worth
    prices.forget(model.directory)
    assert prices.of_host_chunk(chunk(model)) == (0.0, 0)


def test_of_copies_the_one_that_costs_most_counts_in_whatever_order_they_come_and_go() -> None:
    prices, light = ChunkPrices(Clock()), model_of("m", A)
    heavy = replace(light, directory=Path("copy"), weight=4.0)
    prices.load_began(heavy)
    prices.load_began(light)
    both = cost(prices.of_host_chunk(chunk(light)))
    prices.forget(heavy.directory)
    assert both == pytest.approx(4 * cost(prices.of_host_chunk(chunk(light))))


def test_a_chunk_that_stands_in_its_model_twice_counts_once_and_where_it_is_needed_first() -> None:
    prices, model = ChunkPrices(Clock()), model_of("m", [A[0], A[1], A[2], A[1]])
    prices.load_began(model)
    twice = prices.of_host_chunk(chunk(model, 3))
    assert twice == (cost(prices.of_host_chunk(chunk(model, 0))), -1)
    prices.forget(model.directory)
    assert prices.of_host_chunk(chunk(model, 3)) == (0.0, 0)


def test_forgetting_a_model_that_nobody_asked_for_is_harmless() -> None:
    prices = ChunkPrices(Clock())
    prices.forget(model_of("a", A).directory)
    assert prices.of_disk_chunk(chunk(model_of("a", A))) == (0.0, 0)


def test_a_model_busy_on_a_device_keeps_its_place_in_host_memory_though_nobody_loads_it() -> None:
    """Requests price a chunk, not loads: a paused model or a lost worker needs its bytes at once."""
    clock = Clock()
    prices, busy, loaded_often = ChunkPrices(clock), model_of("busy", A), model_of("loaded-often", B)
    prices.load_began(busy)
    for clock.now_s in range(0, 36_000, 60):
        prices.requests_came(busy.manifest.digest, 600)
    for clock.now_s in (20_000.0, 28_000.0, 36_000.0):
        prices.load_began(loaded_often)
        prices.requests_came(loaded_often.manifest.digest, 1)
    assert cost(prices.of_host_chunk(chunk(busy))) > 5 * cost(prices.of_host_chunk(chunk(loaded_often))) > 0


def test_a_request_that_is_told_late_does_not_make_a_model_cheap_that_was_just_loaded_twice() -> None:
    clock = Clock()
    prices, model = ChunkPrices(clock), model_of("a", A)
    for clock.now_s in (0.0, 60.0):
        prices.load_began(model)
    by_loads = cost(prices.of_host_chunk(chunk(model)))
    prices.requests_came(model.manifest.digest, 1)
    assert cost(prices.of_host_chunk(chunk(model))) == by_loads


def test_requests_for_a_model_that_was_never_loaded_are_not_kept() -> None:
    prices, model = ChunkPrices(Clock()), model_of("a", A)
    prices.requests_came(model.manifest.digest, 1000)
    prices.load_began(model)
    once = ChunkPrices(Clock())
    once.load_began(model)
    assert prices.of_host_chunk(chunk(model)) == once.of_host_chunk(chunk(model))
