"""C files of the package: compiled on demand, kept in a private directory, found again."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.system import native_code
from hearth.system.native_code import NativeCodeUnavailable, native_library, remedy_for


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def test_a_library_is_made_and_no_file_of_it_stays(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source.parent / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert native_library(source).answer() == 42
    assert not list(folder.iterdir())


def test_a_kept_library_needs_no_compiler(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library(source, cache)
    (kept,) = cache.iterdir()
    os.utime(kept, (0, 0))
    monkeypatch.setattr(native_code.subprocess, "run", None)
    assert native_library(source, cache).answer() == 42
    assert kept.stat().st_mtime > 0, "a library in use would be pruned"


def test_another_source_is_another_library(source: Path, cache: Path) -> None:
    before = native_library(source, cache)
    source.write_text("int answer(void) { return 43; }")
    assert (before.answer(), native_library(source, cache).answer()) == (42, 43)
    assert len(list(cache.iterdir())) == 2


def test_a_library_that_is_not_whole_is_made_anew(source: Path, cache: Path) -> None:
    native_library(source, cache)
    (kept,) = cache.iterdir()
    kept.unlink()  # the one that is loaded stays as it is
    kept.write_bytes(b"\x7fELF")
    assert native_library(source, cache).answer() == 42


def test_several_may_make_a_library_at_once(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        libraries = list(threads.map(lambda _: native_library(source, cache), range(4)))
    assert [library.answer() for library in libraries] == [42] * 4
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_a_cache_that_others_may_write_to_is_not_used(source: Path, cache: Path) -> None:
    cache.chmod(0o777)
    with pytest.raises(OSError, match="a library is code"):
        native_library(source, cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_compiler_that_is_missing_fails_or_hangs_is_named(
    has_cache: bool, source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = cache if has_cache else None
    slow = source.with_name("slow-cc")
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    odd = source.with_name("odd-cc")
    odd.write_text("#!/bin/sh\nprintf 'error in \\377.c' >&2\nexit 1\n")
    odd.chmod(0o700)
    for compiler, text, remedy in (
        ("/nowhere/cc", "/nowhere/cc", "install a C compiler (cc)"),
        ("false", "false failed", "install another C compiler, and name it in CC"),
        (str(odd), "odd-cc failed: error in \ufffd.c", "install another C compiler, and name it in CC"),
        (str(slow), "took more than", "start again when the machine is less busy"),
    ):
        monkeypatch.setenv("CC", compiler)
        if compiler == str(slow):  # the others have as long as it takes to start them
            monkeypatch.setattr(native_code, "COMPILER_S", 0.1)
        with pytest.raises(NativeCodeUnavailable, match=text) as raised:
            native_library(source, where)
        assert remedy_for(raised.value) == remedy
    assert not list(cache.iterdir())
