"""What a load's record says, from deliveries whose times are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.core.messages import RungBytes, sum_by_rung
from hearth.core.types import Rung
from hearth.store.transfer.record import Delivery, RungTotals, Tally, rung_bytes, totals_by_rung

BEGAN_S = 100.0


def delivery(rung: Rung, began_s: float, *, read_s: float = 1.0, num_failures: int = 0) -> Delivery:
    return Delivery(rung, 4096, began_s, read_s, verify_s=0.25, num_failures=num_failures)


def test_readers_side_by_side_count_once_and_rests_do_not_count() -> None:
    tally = Tally(BEGAN_S)
    for began_s in (103.0, 101.0, 101.5):
        tally.took(delivery(Rung.DISK, began_s), 4096)
    record = tally.record("m", 110.0)
    assert record.rungs == {Rung.DISK: RungTotals(3, 3 * 4096, 1.75 + 1.25)}
    assert (record.read_s, record.verify_s) == (3.0, 0.75)


def test_a_short_delivery_within_a_long_one_adds_no_time() -> None:
    long, short = delivery(Rung.DISK, 101.0, read_s=8.0), delivery(Rung.DISK, 102.0)
    after = delivery(Rung.DISK, 109.0)
    assert totals_by_rung([long, short, after])[Rung.DISK].seconds == 9.25


def test_each_rung_has_its_own_sums() -> None:
    tally = Tally(BEGAN_S)
    tally.waited(1.5)
    tally.waited(2.5)
    tally.took(delivery(Rung.DISK, 101.0), 4096)
    tally.took(delivery(Rung.OBJECT, 101.0, read_s=6.0, num_failures=2), 4096)
    tally.took(None, 2048)
    tally.took(None, 4096)
    record = tally.record("m", 110.0)
    assert record.rungs == {
        Rung.DISK: RungTotals(1, 4096, 1.25),
        Rung.OBJECT: RungTotals(1, 4096, 6.25),
        Rung.HOST: RungTotals(2, 6144, 6.0 * 6144 / (2 * 4096 + 6144)),
    }
    assert (record.total_s, record.wait_s, record.num_failures) == (10.0, 4.0, 2)


def test_a_chunk_that_another_load_was_reading_is_no_use_of_a_rung() -> None:
    tally = Tally(BEGAN_S)
    tally.waited(2.0)
    tally.took(None, 4096)
    tally.took(None, 3 * 4096, is_shared=True)
    record = tally.record("m", 110.0)
    assert record.rungs == {Rung.HOST: RungTotals(1, 4096, 8.0 / 4)}
    assert record.shared_bytes == 3 * 4096


def test_a_rung_that_gave_nothing_is_left_out() -> None:
    tally = Tally(BEGAN_S)
    tally.took(None, 4096)
    assert list(tally.record("m", 101.0).rungs) == [Rung.HOST]


@pytest.mark.parametrize(("noted_s", "told_s"), [(2.5, 2.5), (0.0, 0.0), (None, 10.0)])
def test_without_a_first_layer_of_its_own_a_load_is_usable_at_its_end(
    noted_s: float | None, told_s: float
) -> None:
    assert Tally(BEGAN_S, first_layer_s=noted_s).record("m", 110.0).first_layer_s == told_s


def test_nodes_share_the_seconds_of_their_rung_by_what_they_sent() -> None:
    tally = Tally(100.0)
    for began_s, source in ((100.0, "gpu-2"), (101.25, "gpu-3"), (102.5, "gpu-2"), (103.75, "gpu-2")):
        tally.took(replace(delivery(Rung.PEER, began_s), source=source), 4096)
    tally.took(delivery(Rung.DISK, 100.0), 4096)
    record = tally.record("m", 105.0)
    assert record.rungs[Rung.PEER].bytes_by_source == {"gpu-2": 3 * 4096, "gpu-3": 4096}
    uses = rung_bytes(record, record)
    assert uses == (
        RungBytes(Rung.PEER, 6 * 4096, 7.5, "gpu-2"),
        RungBytes(Rung.PEER, 2 * 4096, 2.5, "gpu-3"),
        RungBytes(Rung.DISK, 2 * 4096, 2.5),
    )
    assert sum_by_rung(uses)[Rung.PEER] == RungBytes(Rung.PEER, 8 * 4096, 10.0)
