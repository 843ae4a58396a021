from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import xxhash

from hearth.core.errors import StoreError, StoreFull
from hearth.models.layout import TensorSpec
from hearth.models.pack import PackedTensor
from hearth.store.format import writer
from hearth.store.format.manifest import MANIFEST, chunk_of
from hearth.store.format.writer import Progress, staged

CHUNK_BYTES = 8192


def _packed() -> list[PackedTensor]:
    """Smaller than a chunk, of one byte, across chunks: 4 KiB, 4 KiB and 20 KiB with padding."""
    tensors = [torch.randn(1000), torch.ones(1, dtype=torch.int8), torch.randn(70, 130).bfloat16()]
    packed, offset = [], 0
    for number, tensor in enumerate(tensors):
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(f"t{number}", dtype, tuple(tensor.shape), offset)
        packed.append(PackedTensor(spec, tensor))
        offset = spec.end
    return packed


def _expected(packed: list[PackedTensor]) -> bytes:
    content = b""
    for item in packed:
        content = content.ljust(item.spec.offset, b"\0") + bytes(
            item.tensor.view(torch.uint8).flatten().tolist()
        )
    return content.ljust(packed[-1].spec.end, b"\0")


#: The smallest descriptions that count as a model's; the second is cut off.
OLD = b'{"format": "hearth-model", "version": 1}'
NEW = b'{"format": "hearth-model", "version": 2, "arch": {'


def _write(dest: Path, content: bytes = OLD, *, overwrite: bool = False, wait: bool = False) -> None:
    with staged(dest, len(content), overwrite=overwrite, wait=wait) as staging:
        staging.write_file(MANIFEST, content)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_tensors_lie_at_their_offsets_with_zeros_between(tmp_path: Path) -> None:
    packed = _packed()
    expected = _expected(packed)

    with staged(tmp_path / "m", len(expected)) as staging:
        written = staging.write_weights(packed, len(expected), CHUNK_BYTES)

    assert (tmp_path / "m" / "weights.bin").read_bytes() == expected
    parts = [expected[begin : begin + CHUNK_BYTES] for begin in range(0, len(expected), CHUNK_BYTES)]
    assert written.chunks == tuple(map(chunk_of, parts))
    assert written.xxh3 == tuple(map(xxhash.xxh3_128_hexdigest, parts))
    assert [len(part) for part in parts] == [8192, 8192, 8192, 4096]


def test_progress_counts_from_nothing_to_the_end(tmp_path: Path) -> None:
    packed = _packed()
    seen: list[Progress] = []

    with staged(tmp_path / "m", 28672) as staging:
        staging.write_weights(packed, 28672, CHUNK_BYTES, seen.append)

    assert seen == [Progress(done, 28672) for done in (0, 8192, 16384, 24576, 28672)]


def test_nothing_but_the_model_is_left(tmp_path: Path) -> None:
    _write(tmp_path / "deep" / "m")

    assert _names(tmp_path / "deep") == ["m"]
    assert _names(tmp_path / "deep" / "m") == [MANIFEST]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> None:
        with staged(tmp_path / "m", 10) as staging:
            staging.write_file("tokenizer.json", b"{}")
            raise error

    with pytest.raises(error):
        interrupted()

    assert _names(tmp_path) == []


def test_what_a_killed_conversion_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".m.converting"
    left.mkdir()
    (left / ".lock").touch()
    (left / "weights.bin").write_bytes(b"half")
    (left / "strange.json").touch()

    _write(tmp_path / "m")

    assert _names(tmp_path) == ["m"]
    assert _names(tmp_path / "m") == [MANIFEST]


def test_a_second_conversion_to_the_same_place_is_refused(tmp_path: Path) -> None:
    with staged(tmp_path / "m", 2) as staging:
        with pytest.raises(StoreError, match=r"another conversion is writing .*; wait"):
            _write(tmp_path / "m")
        staging.write_file(MANIFEST, b"{}")

    assert _names(tmp_path / "m") == [MANIFEST]


def test_whoever_waits_writes_when_the_other_has_ended(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        with staged(tmp_path / "m", len(OLD)) as staging:
            second = threads.submit(_write, tmp_path / "m", NEW, overwrite=True, wait=True)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.2)
            staging.write_file(MANIFEST, OLD)
        second.result()

    assert (tmp_path / "m" / MANIFEST).read_bytes() == NEW
    assert _names(tmp_path / "m") == [MANIFEST]
    assert _names(tmp_path) == ["m"]


@pytest.mark.parametrize("exchange", [True, False])
def test_many_who_wait_for_each_other_all_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("hearth.store.format.writer._exchange", lambda directory, dest: False)
    contents = [OLD + str(number).encode() for number in range(40)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda text: _write(tmp_path / "m", text, overwrite=True, wait=True), contents))

    assert (tmp_path / "m" / MANIFEST).read_bytes() in contents
    assert _names(tmp_path / "m") == [MANIFEST]
    assert _names(tmp_path) == ["m"]


def test_a_lock_that_is_taken_away_while_it_is_awaited_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the other's opening the lock and locking it, the owner finishes and renames the directory."""
    flock = fcntl.flock

    def finish_first(lock: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(tmp_path / ".m.converting")
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", finish_first)

    _write(tmp_path / "m")

    assert _names(tmp_path) == ["m"]


def test_an_existing_model_stays_unless_told_otherwise(tmp_path: Path) -> None:
    _write(tmp_path / "m", OLD)

    with pytest.raises(
        StoreError, match=r"holds a model already; choose another destination, or .* `--force`"
    ):
        _write(tmp_path / "m", NEW)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == OLD
    assert _names(tmp_path) == ["m"]


def test_an_existing_model_is_replaced_when_told(tmp_path: Path) -> None:
    _write(tmp_path / "m", OLD)
    (tmp_path / "m" / "weights.bin").write_bytes(b"old weights")

    _write(tmp_path / "m", NEW, overwrite=True)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == NEW
    assert _names(tmp_path / "m") == [MANIFEST]
    assert _names(tmp_path) == ["m"]


def test_a_model_stays_when_its_replacement_fails(tmp_path: Path) -> None:
    _write(tmp_path / "m", OLD)

    with pytest.raises(RuntimeError), staged(tmp_path / "m", 3, overwrite=True):
        raise RuntimeError

    assert (tmp_path / "m" / MANIFEST).read_bytes() == OLD
    assert _names(tmp_path) == ["m"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_model_stays_when_the_second_of_two_renames_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _write(tmp_path / "m", OLD)
    rename = os.rename

    def fail(source: Path, dest: Path) -> None:
        if source.name == ".m.converting":
            raise error
        rename(source, dest)

    monkeypatch.setattr("hearth.store.format.writer._exchange", lambda directory, dest: False)
    monkeypatch.setattr(os, "rename", fail)

    with pytest.raises((StoreError, KeyboardInterrupt)):
        _write(tmp_path / "m", NEW, overwrite=True)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == OLD
    assert _names(tmp_path / "m") == [MANIFEST]
    assert _names(tmp_path) == ["m"]


def test_an_interrupt_right_after_the_exchange_leaves_the_new_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "m", OLD)

    def interrupt(directory: Path, dest: Path) -> bool:
        assert exchange(directory, dest)
        raise KeyboardInterrupt

    exchange = writer._exchange
    monkeypatch.setattr(writer, "_exchange", interrupt)

    with pytest.raises(KeyboardInterrupt):
        _write(tmp_path / "m", NEW, overwrite=True)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == NEW
    assert _names(tmp_path / "m") == [MANIFEST]
    assert _names(tmp_path) == ["m"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_system_that_cannot_exchange_renames_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Library:
        def __init__(self, name: None, *, use_errno: bool) -> None:
            ctypes.set_errno(code)

        def renameat2(self, *args: object) -> int:
            return -1

    _write(tmp_path / "m", OLD)
    monkeypatch.setattr(ctypes, "CDLL", Library)

    _write(tmp_path / "m", NEW, overwrite=True)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == NEW
    assert _names(tmp_path) == ["m"]


def test_a_model_killed_between_two_renames_comes_back(tmp_path: Path) -> None:
    _write(tmp_path / ".m.replaced", OLD)

    with pytest.raises(StoreError, match="holds a model already"):
        _write(tmp_path / "m", NEW)

    assert (tmp_path / "m" / MANIFEST).read_bytes() == OLD
    assert _names(tmp_path) == ["m"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_model_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "diary.txt").touch()

    with pytest.raises(StoreError, match="is no Hearth model, so it stays"):
        _write(tmp_path / "m", overwrite=overwrite)

    assert _names(tmp_path / "m") == ["diary.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_of_another_program_is_no_model(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / MANIFEST).write_text('{"manifest_version": 3, "name": "An extension"}')
    (tmp_path / "m" / "background.js").touch()

    with pytest.raises(StoreError, match="is no Hearth model, so it stays"):
        _write(tmp_path / "m", overwrite=overwrite)

    assert _names(tmp_path / "m") == ["background.js", MANIFEST]


@pytest.mark.parametrize("name", ["source/model.safetensors", "diary.txt", "tokenizer.json/diary.txt"])
def test_a_model_with_something_else_beside_it_is_never_replaced(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "m")
    other = tmp_path / "m" / name
    other.parent.mkdir(exist_ok=True)
    other.touch()

    with pytest.raises(StoreError, match=f"holds more than a model, so it stays: {name.partition('/')[0]};"):
        _write(tmp_path / "m", overwrite=True)

    assert other.exists()
    assert (tmp_path / "m" / MANIFEST).read_bytes() == OLD


def test_what_is_put_beside_a_model_while_its_successor_is_written_stays(tmp_path: Path) -> None:
    def write_while_another_does() -> None:
        with staged(tmp_path / "m", len(NEW), overwrite=True) as staging:
            staging.write_file(MANIFEST, NEW)
            (tmp_path / "m" / "diary.txt").touch()

    _write(tmp_path / "m")

    with pytest.raises(StoreError, match="holds more than a model"):
        write_while_another_does()

    assert _names(tmp_path / "m") == ["diary.txt", MANIFEST]


def test_the_root_of_the_file_system_is_no_destination() -> None:
    with pytest.raises(StoreError, match="a model cannot be `/` itself; name a directory in it"):
        _write(Path("/"))


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()

    _write(tmp_path / "m")

    assert _names(tmp_path / "m") == [MANIFEST]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match=r"cannot write `.*/file/\.m\.converting`: .*; check the path"):
        _write(tmp_path / "file" / "m")


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path) -> None:
    needed = shutil.disk_usage(tmp_path).total * 2

    with pytest.raises(StoreFull, match=f"needed: {needed} bytes, free: [0-9]+ bytes; make room"):
        staged(tmp_path / "m", needed).__enter__()

    assert _names(tmp_path) == []


def _failing(call: Callable[..., int], after: int, code: int) -> Callable[..., int]:
    """The call, but from the given number of calls on it fails."""
    num_calls = 0

    def fail(*args: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise OSError(code, os.strerror(code))
        return call(*args)

    return fail


class Failure(NamedTuple):
    call: str
    after: int
    code: int


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (Failure("write", 0, errno.ENOSPC), StoreFull),
        (Failure("write", 2, errno.ENOSPC), StoreFull),
        (Failure("write", 2, errno.EDQUOT), StoreFull),
        (Failure("write", 2, errno.EFBIG), StoreFull),
        (Failure("write", 2, errno.EIO), StoreError),
        (Failure("fsync", 0, errno.ENOSPC), StoreFull),
        (Failure("fsync", 0, errno.EIO), StoreError),
        (Failure("rename", 0, errno.EIO), StoreError),
    ],
)
def test_a_failing_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Failure, error: type[StoreError]
) -> None:
    failing = _failing(getattr(os, failure.call), failure.after, failure.code)
    monkeypatch.setattr(os, failure.call, failing)

    with (
        pytest.raises(error, match=os.strerror(failure.code)) as caught,
        staged(tmp_path / "m", 28672) as staging,
    ):
        staging.write_weights(_packed(), 28672, CHUNK_BYTES)

    assert type(caught.value) is error
    assert _names(tmp_path) == []


def test_a_write_that_takes_only_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
    packed = _packed()

    with staged(tmp_path / "m", 28672) as staging:
        staging.write_weights(packed, 28672, CHUNK_BYTES)

    assert (tmp_path / "m" / "weights.bin").read_bytes() == _expected(packed)
