from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.errors import SnapshotError
from hearth.snapshot.key import installation_key


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: installation_key(tmp_path / "key"), range(32)))
    assert len(keys) == 1
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_installations_have_different_keys(tmp_path: Path) -> None:
    assert installation_key(tmp_path / "one") != installation_key(tmp_path / "two")


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    installation_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(SnapshotError, match="alone"):
        installation_key(tmp_path / "key")


def test_a_key_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    installation_key(tmp_path / "key")
    os.truncate(tmp_path / "key", 7)
    with pytest.raises(SnapshotError, match="32 bytes, given: 7"):
        installation_key(tmp_path / "key")
