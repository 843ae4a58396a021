"""Files that are replaced as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.core.atomic_file import write_file


def test_a_file_is_private_and_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise EOFError

    path = tmp_path / "file"
    write_file(path, [b"old"])
    with pytest.raises(EOFError):
        write_file(path, broken())
    with pytest.raises(FileExistsError):
        write_file(path, [b"second"], place=os.link)
    assert path.read_bytes() == b"old"
    write_file(path, [b"n", memoryview(b"ew")])
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]
