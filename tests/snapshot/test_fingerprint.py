from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hearth.core.errors import SnapshotCorrupt
from hearth.snapshot.fingerprint import Fingerprint
from tests.snapshot.fingerprints import FINGERPRINT


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_any_other_field_is_another_fingerprint_and_is_named(name: str) -> None:
    value = getattr(FINGERPRINT, name)
    other = replace(FINGERPRINT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest != FINGERPRINT.digest
    assert [one.name for one in FINGERPRINT.differences(other)] == [name]
    assert str(value) in str(FINGERPRINT.differences(other)[0])


def test_values_that_move_between_fields_are_another_fingerprint() -> None:
    one = replace(FINGERPRINT, cuda="1", cublas="23")
    other = replace(FINGERPRINT, cuda="12", cublas="3")
    assert one.digest != other.digest


def test_a_packed_fingerprint_is_the_same_again() -> None:
    assert Fingerprint.unpack(FINGERPRINT.pack()) == FINGERPRINT
    assert FINGERPRINT.differences(FINGERPRINT) == []


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"{}", b'{"manifest": "x"}', b"\xff", b"[" * 100_000, b'{"a":' * 100_000),
        FINGERPRINT.pack().replace(b'"2.11.0"', b"2"),
        FINGERPRINT.pack().replace(b'"2.11.0"', b'"\xff"'),
        FINGERPRINT.pack().replace(b'"torch"', b'"\xff"'),
        FINGERPRINT.pack().replace(b'"2.11.0"', b"[[]]"),
        FINGERPRINT.pack().replace(str(FINGERPRINT.device_bytes).encode(), b'"141 GiB"'),
        FINGERPRINT.pack().replace(str(FINGERPRINT.device_bytes).encode(), b"9" * 10_000),
    ],
    ids=lambda raw: str(raw[-24:]),
)
def test_bytes_that_are_no_fingerprint_are_refused(raw: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        Fingerprint.unpack(raw)


def test_a_fingerprint_of_another_hearth_says_in_which_fields_it_differs() -> None:
    raw = FINGERPRINT.pack().replace(b'"torch"', b'"pytorch"')
    with pytest.raises(SnapshotCorrupt, match="this Hearth: `pytorch`, `torch`"):
        Fingerprint.unpack(raw)
