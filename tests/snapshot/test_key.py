from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.core.errors import SnapshotError
from hearth.snapshot.file import KEY_BYTES
from hearth.snapshot.key import installation_key, known_key


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


def make_open_pipe(path: Path) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)


def make_pipe_with_key(path: Path) -> int:
    pipe = make_open_pipe(path)
    os.write(pipe, bytes(KEY_BYTES))
    return pipe


def make_socket(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    return found


def make_link(path: Path) -> None:
    installation_key(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    "put",
    [
        lambda path: path.mkdir(mode=0o700),
        lambda path: os.mkfifo(path, 0o600),
        make_open_pipe,
        make_pipe_with_key,
        make_socket,
        make_link,
        lambda path: path.symlink_to("nowhere"),
    ],
)
def test_what_is_no_file_is_no_key_and_nothing_of_it_stays_open(
    tmp_path: Path, put: Callable[[Path], object]
) -> None:
    path = tmp_path / "key"
    held = put(path)
    before = os.listdir("/proc/self/fd")
    for look in (installation_key, known_key):
        with pytest.raises(SnapshotError, match=r"is not a regular file|cannot be opened"):
            look(path)
    assert set(os.listdir("/proc/self/fd")) <= set(before)
    if isinstance(held, int):
        os.close(held)
    elif isinstance(held, socket.socket):
        held.close()
