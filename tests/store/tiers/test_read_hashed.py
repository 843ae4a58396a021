"""The reader in C: made once, and only used if it finds what Python's xxhash finds."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from hearth.store.tiers import read_hashed
from hearth.system.native_code import native_library


def test_the_compiler_runs_once_however_many_read(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, calls = native_library(read_hashed._SOURCE), []
    monkeypatch.setattr(read_hashed, "native_library", lambda _: calls.append(1) or compiled)
    monkeypatch.setattr(read_hashed, "_compiled_reader", cache(read_hashed._compiled_reader.__wrapped__))
    with ThreadPoolExecutor(14) as threads:
        assert all(threads.map(lambda _: read_hashed.is_native(), range(14)))
    assert calls == [1]


def test_a_library_that_hashes_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, *_ = read_hashed._hash_functions()
    wrong.update = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # hashes nothing
    for found, is_used in (([wrong], False), ([wrong, *read_hashed._hash_functions()], True)):
        monkeypatch.setattr(read_hashed, "_hash_functions", lambda found=found: iter(found))
        monkeypatch.setattr(read_hashed, "_compiled_reader", cache(read_hashed._compiled_reader.__wrapped__))
        assert read_hashed.is_native() == is_used


def test_without_a_compiler_the_interpreter_reads_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setattr(read_hashed, "_compiled_reader", cache(read_hashed._compiled_reader.__wrapped__))
    assert not any(read_hashed.is_native() for _ in range(3))
    assert [record.message.partition(" reason")[0] for record in caplog.records] == [
        "fallback reader=interpreted"
    ]
