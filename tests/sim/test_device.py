"""The memory of a simulated device: units come in forward order and go from their end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId
from hearth.sim.device import NUM_UNITS, DeviceMemory

A, B = ModelId("a"), ModelId("b")


@given(st.integers(1, 10_000))
def test_the_units_of_a_model_are_all_of_it_and_none_is_empty(num_bytes: int) -> None:
    device = DeviceMemory(num_bytes)
    assert device.place_weights(A, "", num_bytes) == 0
    weights = device.weights[A]
    assert sum(weights.units) == num_bytes == device.count_bytes(A)
    assert min(weights.units) > 0
    assert len(weights.units) == min(NUM_UNITS, num_bytes)
    assert device.free_bytes == 0


@given(st.integers(1, 10_000), st.integers(0, NUM_UNITS))
def test_weights_go_from_their_end_and_what_is_left_is_not_placed_again(
    num_bytes: int, num_taken: int
) -> None:
    device = DeviceMemory(num_bytes)
    device.place_weights(A, "", num_bytes)
    weights = device.weights[A]
    num_taken = min(num_taken, weights.num_units)
    taken_bytes = sum(weights.tail[:num_taken])
    device.take_units(A, num_taken)
    assert device.count_bytes(A) == num_bytes - taken_bytes == num_bytes - device.free_bytes
    assert device.place_weights(A, "", num_bytes) == num_bytes - taken_bytes
    assert device.count_bytes(A) == num_bytes


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_truncating_leaves_at_most_so_much_and_at_least_one_unit_less(
    num_bytes: int, most_bytes: int
) -> None:
    device = DeviceMemory(num_bytes)
    device.place_weights(A, "", num_bytes)
    largest = max(device.weights[A].units)
    device.truncate(A, most_bytes)
    assert device.count_bytes(A) <= most_bytes
    assert device.count_bytes(A) > min(most_bytes, num_bytes) - largest


def test_bytes_of_another_version_are_of_no_use() -> None:
    device = DeviceMemory(100)
    device.place_weights(A, "old", 40)
    assert device.place_weights(A, "new", 40) == 0
    assert device.free_bytes == 60


def test_a_stage_keeps_the_bytes_of_its_layers_and_the_whole_model_those_of_its_stage() -> None:
    device = DeviceMemory(100, page_bytes=1)
    device.place_weights(A, "", 40)
    assert device.place_weights(A, "", 20, begin_bytes=20) == 20
    assert device.free_bytes == 80
    assert device.place_weights(A, "", 20, begin_bytes=10) == 10
    assert device.place_weights(A, "", 40) == 20


def test_an_evicted_model_keeps_its_weights_and_a_dropped_one_nothing() -> None:
    device = DeviceMemory(100)
    for model in (A, B):
        device.place_weights(model, "", 30)
        device.place_other(model, 10, 0)
    assert device.free_bytes == 20
    device.free_other(A)
    assert (device.free_bytes, device.count_bytes(A)) == (30, 30)
    device.drop(B)
    assert (device.free_bytes, device.count_bytes(B)) == (70, 0)


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_with_pages_all_units_are_one_and_the_last_may_be_filled_in_part(
    num_bytes: int, page_bytes: int
) -> None:
    device = DeviceMemory(20_000, page_bytes)
    device.place_weights(A, "", num_bytes)
    assert set(device.weights[A].units) == {page_bytes}
    assert num_bytes <= device.count_bytes(A) == device.rounded(num_bytes) < num_bytes + page_bytes
    assert device.place_weights(A, "", num_bytes) == device.rounded(num_bytes)  # all of it is there


def test_what_a_model_has_beside_its_weights_grows_and_shrinks() -> None:
    device = DeviceMemory(100)
    device.place_other(A, 10, workspace_bytes=20)
    device.place_other(B, 5, workspace_bytes=30)
    device.resize_other(A, 7)
    assert device.free_bytes == 100 - 10 - 7 - 5 - 30
    device.resize_other(A, -7)
    device.free_other(B)
    assert device.free_bytes == 100 - 10 - 20
