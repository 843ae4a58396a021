from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hearth.snapshot.fingerprint import Fingerprint
from tests.snapshot.fingerprints import FINGERPRINT


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_any_other_field_is_another_fingerprint_and_is_named(name: str) -> None:
    value = getattr(FINGERPRINT, name)
    other = replace(FINGERPRINT, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest != FINGERPRINT.digest
    assert [one.name for one in FINGERPRINT.differences(other)] == [name]
    assert str(value) in str(FINGERPRINT.differences(other)[0])
    assert FINGERPRINT.differences(FINGERPRINT) == []


def test_values_that_move_between_fields_are_another_fingerprint() -> None:
    one = replace(FINGERPRINT, cuda="1", cublas="23")
    other = replace(FINGERPRINT, cuda="12", cublas="3")
    assert one.digest != other.digest
