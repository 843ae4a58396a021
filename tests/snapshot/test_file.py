"""Files of snapshots: what is written is read again, and whatever was done to a file is refused."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotForeign,
    SnapshotTruncated,
    SnapshotUnauthenticated,
    StoreFull,
)
from hearth.snapshot.file import (
    ALIGNMENT,
    MAGIC,
    MAX_HEADER_BYTES,
    VERSION,
    _mac,
    open_snapshot,
    write_snapshot,
)
from tests.snapshot.fingerprints import FINGERPRINT, KEY, OTHER_KEY

SECTIONS = {"memory": b"m" * 100, "graphs/1": bytes(range(256)) * 40, "empty": b""}

sections = st.dictionaries(st.text(max_size=64), st.binary(max_size=300), max_size=8)


def written(directory: Path | str, data: dict[str, bytes] = SECTIONS) -> Path:
    path = Path(directory) / "a.snapshot"
    num_bytes = write_snapshot(path, FINGERPRINT, data, KEY)
    assert num_bytes >= sum(map(len, data.values()))
    return path


def read(path: Path) -> dict[str, bytes]:
    with open_snapshot(path, KEY) as opened:
        assert opened.fingerprint == FINGERPRINT
        return {name: bytes(data) for name, data in opened.items()}


@given(sections)
def test_what_was_written_is_read_again(data: dict[str, bytes]) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "a.snapshot"
        assert write_snapshot(path, FINGERPRINT, data, KEY) == path.stat().st_size
        assert read(path) == data
        assert os.listdir(place) == ["a.snapshot"]


@given(sections, st.data())
def test_a_file_that_ends_early_or_late_is_refused(data: dict[str, bytes], draw: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        path = written(place, data)
        whole = path.read_bytes()
        end = draw.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:end])
        with pytest.raises(SnapshotTruncated):
            read(path)
        path.write_bytes(whole + b"\0")
        with pytest.raises(SnapshotTruncated):
            read(path)


@given(sections, st.data())
def test_a_flipped_bit_is_refused(data: dict[str, bytes], draw: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        path = written(place, data)
        changed = bytearray(path.read_bytes())
        changed[draw.draw(st.integers(0, len(changed) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        path.write_bytes(changed)
        with pytest.raises(SnapshotError):
            read(path)


def test_a_flipped_bit_of_a_section_is_found_when_that_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path)
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with open_snapshot(path, KEY) as opened:
        assert bytes(opened["memory"]) == SECTIONS["memory"]
        with pytest.raises(SnapshotCorrupt, match="graphs/1"):
            opened["graphs/1"]
        with pytest.raises(SnapshotCorrupt):
            opened.verify()


@given(st.binary(max_size=2000), st.booleans())
def test_any_bytes_are_refused_cleanly(content: bytes, has_begun_well: bool) -> None:
    with TemporaryDirectory() as place:
        path = Path(place) / "a.snapshot"
        path.write_bytes((struct.pack("<8sI", MAGIC, VERSION) if has_begun_well else b"") + content)
        path.chmod(0o600)
        with pytest.raises(SnapshotError):
            read(path)


@pytest.mark.parametrize("num_bytes", [None, 1 << 40])
@pytest.mark.parametrize("header_bytes", [MAX_HEADER_BYTES + 1, (1 << 32) - 1])
def test_a_header_that_is_too_long_is_refused_before_memory_is_allocated(
    tmp_path: Path, header_bytes: int, num_bytes: int | None
) -> None:
    """Its length is not authenticated yet; a sparse file may be as long as it says."""
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    struct.pack_into("<I", whole, 12, header_bytes)
    path.write_bytes(whole)
    if num_bytes is not None:
        os.truncate(path, num_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotCorrupt, match=f"header of {header_bytes} bytes, limit"):
            open_snapshot(path, KEY)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("header", [b"", b"\xff", b"\x90", b"\x80", msgspec.msgpack.encode({"sections": {}})])
def test_an_authentic_header_with_other_fields_is_refused(tmp_path: Path, header: bytes) -> None:
    head = struct.pack("<8sII", MAGIC, VERSION, len(header))
    path = tmp_path / "a.snapshot"
    path.write_bytes(head + _mac(head + header, KEY) + header)
    path.chmod(0o600)
    with pytest.raises(SnapshotForeign, match="was written by another Hearth"):
        open_snapshot(path, KEY)


def test_a_file_may_have_thousands_of_sections(tmp_path: Path) -> None:
    data = {f"graph/decode-{number}": b"x" for number in range(4096)}
    assert read(written(tmp_path, data)) == data


def test_a_file_beyond_its_limit_is_not_written(tmp_path: Path) -> None:
    num_bytes = written(tmp_path).stat().st_size
    with pytest.raises(StoreFull, match=f"takes {num_bytes} bytes"):
        write_snapshot(tmp_path / "b", FINGERPRINT, SECTIONS, KEY, max_bytes=num_bytes - 1)
    assert os.listdir(tmp_path) == ["a.snapshot"]


def test_sections_are_aligned(tmp_path: Path) -> None:
    with open_snapshot(written(tmp_path), KEY) as opened:
        taken = [np.frombuffer(opened["graphs/1"], np.uint8) for _ in range(4)]
    assert {one.ctypes.data % ALIGNMENT for one in taken} == {0}


def test_nothing_is_taken_from_a_file_that_was_closed(tmp_path: Path) -> None:
    with open_snapshot(written(tmp_path), KEY) as opened:
        taken = opened["memory"]
    assert bytes(taken) == SECTIONS["memory"]
    with pytest.raises(AssertionError, match="was closed"):
        opened["memory"]


def test_a_file_of_another_installation_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(SnapshotUnauthenticated, match="not written by this installation"):
        open_snapshot(path, OTHER_KEY)


@pytest.mark.parametrize("content", [b"x" * 200, b"HEARTHSN" + struct.pack("<I", 99) + bytes(200)])
def test_another_file_or_version_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.snapshot"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SnapshotForeign):
        open_snapshot(path, KEY)


@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o620), lambda path: path.chmod(0o602), lambda path: _link(path)]
)
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = written(tmp_path)
    spoil(path)
    with pytest.raises((SnapshotUnauthenticated, OSError)):
        open_snapshot(path, KEY)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


CUT_OFF = """
import os, sys
from pathlib import Path
from hearth.core.errors import SnapshotTruncated
from hearth.snapshot.file import open_snapshot
from tests.snapshot.fingerprints import KEY
with open_snapshot(Path(sys.argv[1]), KEY) as opened:
    os.truncate(sys.argv[1], 4096)
    try:
        opened["graphs/1"]
    except SnapshotTruncated as error:
        print(error)
"""


def test_a_file_that_is_cut_off_after_it_was_opened_is_refused_and_ends_nobody(tmp_path: Path) -> None:
    """Were it mapped, SIGBUS would end the process, as for a block that the disk cannot read."""
    path = written(tmp_path, {"graphs/1": bytes(1 << 16)})
    run = run_script(CUT_OFF, path)
    assert run.returncode == 0, run.stderr
    assert "should have" in run.stdout


@pytest.mark.parametrize("has_header", [True, False])
def test_a_disk_that_cannot_read_a_block_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_header: bool
) -> None:
    """A directory removes such a file as it does one that is damaged."""
    path, preadv = written(tmp_path), os.preadv
    readable = path.read_bytes().index(SECTIONS["graphs/1"]) if has_header else 10

    def read_some(file: int, into: Sequence[memoryview], at: int) -> int:
        if at >= readable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(file, [one[: readable - at] for one in into], at)

    monkeypatch.setattr(os, "preadv", read_some)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SnapshotCorrupt, match=r"a.snapshot` cannot be read: Input/output error; delete it"):
        read(path)
    assert len(os.listdir("/proc/self/fd")) <= num_files
    if has_header:
        with open_snapshot(path, KEY) as opened:
            assert bytes(opened["memory"]) == SECTIONS["memory"]


FILL = """
import resource, signal, sys
from pathlib import Path
from hearth.core.errors import StoreFull
from hearth.snapshot.file import write_snapshot
from tests.snapshot.fingerprints import FINGERPRINT, KEY
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_snapshot(Path(sys.argv[1]), FINGERPRINT, {"graphs": bytes(1 << 16)}, KEY)
except StoreFull as error:
    print(error)
"""


def run_script(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    run = run_script(FILL, path)
    assert "no room for the snapshot" in run.stdout, run.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.snapshot"]


def test_a_disk_that_is_found_to_be_full_when_all_is_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems that find room for bytes only when these are flushed."""
    path = written(tmp_path)
    before = path.read_bytes()

    def refuse(file: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreFull, match="no room for the snapshot"):
        written(tmp_path, {"memory": b"another"})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.snapshot"]


DIE = """
import os, signal, sys
from pathlib import Path
from hearth.snapshot.file import write_snapshot
from tests.snapshot.fingerprints import FINGERPRINT, KEY
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
write_snapshot(Path(sys.argv[1]), FINGERPRINT, {"graphs": bytes(1 << 16)}, KEY)
"""


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    assert run_script(DIE, path).returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    (left,) = set(os.listdir(tmp_path)) - {"a.snapshot"}
    assert left.startswith("."), "not taken for a snapshot, and removed by the next start"


def test_of_several_who_write_at_once_all_of_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    contents = [{"memory": bytes([number]) * 50_000} for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        writes = [threads.submit(written, tmp_path, content) for content in contents]
        wait(writes[:1])
        while not all(one.done() for one in writes):
            assert read(path) in contents
        assert {one.result() for one in writes} == {path}
    assert read(path) in contents
    assert os.listdir(tmp_path) == ["a.snapshot"]
