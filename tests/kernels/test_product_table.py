from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hearth.kernels.product_table import ALGORITHM_BYTES, ProductSize, ProductTable

SIZE = ProductSize(64, 4096, 11008, "bfloat16", adds=True)
TABLE = ProductTable(
    "NVIDIA H200",
    "130100",
    {SIZE: bytes(range(ALGORITHM_BYTES)), replace(SIZE, adds=False): bytes(ALGORITHM_BYTES)},
)


def find(path: Path) -> ProductTable | None:
    return ProductTable.find(path, TABLE.device, TABLE.library)


def test_a_table_is_found_as_it_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.products"
    assert find(path) is None
    TABLE.save(path)
    found = find(path)
    assert found == TABLE
    assert found.digest == TABLE.digest
    assert [one.name for one in tmp_path.iterdir()] == ["a.products"]


@pytest.mark.parametrize(("device", "library"), [("NVIDIA H100", "130100"), ("NVIDIA H200", "130200")])
def test_a_table_of_another_device_or_library_is_none(tmp_path: Path, device: str, library: str) -> None:
    path = tmp_path / "a.products"
    TABLE.save(path)
    assert ProductTable.find(path, device, library) is None
    assert find(path) == TABLE, "it is there for others"


def test_the_first_table_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.products"
    TABLE.save(path)
    replace(TABLE, algorithms={}).save(path)
    assert find(path) == TABLE


@pytest.mark.parametrize(
    "broken",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: raw.replace(b"4096", b"4097"),
        lambda raw: raw.replace(b'"version": 1', b'"version": 2'),
        lambda raw: raw.replace(b"3e3f", b"3e"),
    ],
)
def test_a_table_that_is_not_as_it_was_written_is_told_of_and_removed(
    tmp_path: Path, broken: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(broken)
    path = tmp_path / "a.products"
    TABLE.save(path)
    raw = path.read_bytes()
    path.write_bytes(broken(raw))
    assert path.read_bytes() != raw
    assert find(path) is None
    assert "product_table_broken" in caplog.text
    TABLE.save(path)
    assert find(path) == TABLE


def test_any_other_kernel_is_another_table() -> None:
    others = [
        replace(TABLE, device="NVIDIA H100"),
        replace(TABLE, library="130200"),
        replace(TABLE, algorithms={SIZE: bytes(range(ALGORITHM_BYTES))}),
        replace(TABLE, algorithms={**TABLE.algorithms, SIZE: bytes(ALGORITHM_BYTES)}),
    ]
    assert len({TABLE.digest, *(one.digest for one in others)}) == 1 + len(others)
    backwards = dict(reversed(TABLE.algorithms.items()))
    assert replace(TABLE, algorithms=backwards).digest == TABLE.digest
