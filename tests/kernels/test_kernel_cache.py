"""The directory of compiled kernels: whose it is, what is found in it, what is removed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.backends.nvidia import compiler as nvidia

from hearth.core.errors import DeviceError
from hearth.kernels.kernel_cache import (
    MAX_IDLE_S,
    CachedVariant,
    KernelCache,
    hash_compiler,
    prepare_to_load,
    usage_of,
)
from hearth.kernels.variants import TargetDriver, Variant

VARIANT = CachedVariant(Variant("hearth.kernels.norm", "_add_norm_kernel", "{}"), "ENTRY")


@pytest.fixture(autouse=True)
def _tritons_own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        yield


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache.open(tmp_path / "kernels")


def age(path: Path, seconds: float) -> None:
    """Make a file or directory, with all that is in it, look unused for so long."""
    then_s = time.time() - seconds
    for one in (path, *path.rglob("*")):
        os.utime(one, (then_s, then_s))


def test_the_directory_is_its_owners_alone_and_triton_uses_it(tmp_path: Path) -> None:
    path = KernelCache.open(tmp_path / "kernels").path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert triton.knobs.cache.dir == str(path)


def test_a_directory_that_others_may_write_to_is_closed_to_them_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    assert stat.S_IMODE(KernelCache.open(tmp_path / "kernels").path.stat().st_mode) == 0o700
    assert "kernel_cache_closed" in caplog.text


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DeviceError, match=r"belongs to user .* kernels are code"):
        KernelCache.open(tmp_path / "kernels")


def test_a_place_where_no_directory_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match="cannot be used"):
        KernelCache.open(tmp_path / "file" / "kernels")


def test_where_the_user_has_told_triton_to_keep_kernels_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert KernelCache.open(tmp_path / "kernels").path == tmp_path / "mine"


def test_a_list_is_found_while_all_of_its_entries_are_there(cache: KernelCache) -> None:
    assert cache.find("key") is None
    cache.save("key", [VARIANT])
    assert cache.find("key") is None, "the entry is missing"
    (cache.path / "ENTRY").mkdir()
    assert cache.find("key") == [VARIANT]


@pytest.mark.parametrize("text", ["", "[", "[1]", '[{"variant": {"x": 1}, "entry": "E"}]', '{"a": 1}'])
def test_a_broken_list_is_compiled_anew(cache: KernelCache, text: str) -> None:
    (cache.path / "lists" / "key.json").write_text(text, encoding="utf-8")
    assert cache.find("key") is None


def test_a_list_that_names_code_of_others_is_not_loaded(cache: KernelCache) -> None:
    (cache.path / "ENTRY").mkdir()
    cache.save("key", [CachedVariant(Variant("os", "system", "{}"), "ENTRY")])
    assert cache.load("key") is None


def test_a_list_that_cannot_be_loaded_is_no_longer_found_so_that_it_is_compiled_anew(
    cache: KernelCache,
) -> None:
    for name in ("ENTRY", "OTHER"):
        (cache.path / name).mkdir()
    cache.save("key", [VARIANT])
    assert cache.load("key") is None, "the interpreter has no compiled kernels"
    assert cache.find("key") is None
    assert sorted(path.name for path in cache.path.iterdir()) == ["OTHER", "lists"]


def test_what_nobody_has_used_for_long_is_removed_and_the_rest_stays(cache: KernelCache) -> None:
    for name in ("old", "new", "read"):
        (cache.path / name).mkdir()
        (cache.path / name / "kernel.cubin").write_bytes(b"code")
    cache.save("old", [])
    cache.save("new", [])
    age(cache.path / "old", MAX_IDLE_S + 60)
    age(cache.path / "lists" / "old.json", MAX_IDLE_S + 60)
    age(cache.path / "new", MAX_IDLE_S - 60)
    age(cache.path / "read", MAX_IDLE_S + 60)
    os.utime(cache.path / "read" / "kernel.cubin", (time.time(), time.time() - MAX_IDLE_S - 60))

    assert cache.prune() == 2

    assert sorted(path.name for path in cache.path.iterdir()) == ["lists", "new", "read"]
    assert cache.find("old") is None
    assert cache.find("new") == []
    assert cache.prune() == 0


def test_a_directory_that_the_user_has_chosen_is_never_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cache = KernelCache.open(tmp_path)
    (tmp_path / "ENTRY").mkdir()
    age(tmp_path / "ENTRY", MAX_IDLE_S * 2)
    assert cache.prune() == 0
    assert (tmp_path / "ENTRY").is_dir()


def test_using_a_list_keeps_it_and_its_entries(cache: KernelCache) -> None:
    cache.save("key", [])
    age(cache.path / "lists", MAX_IDLE_S * 2)
    assert cache.load("key") == 0
    assert cache.prune() == 0


def test_the_place_that_kernels_take_is_counted_without_their_lists(cache: KernelCache) -> None:
    (cache.path / "ENTRY").mkdir()
    (cache.path / "ENTRY" / "kernel.cubin").write_bytes(b"code")
    usage = usage_of(cache.path)
    assert (usage.num_entries, usage.num_bytes) == (1, 4)
    assert usage_of(cache.path / "nowhere").num_bytes == 0


def test_a_compiler_that_cannot_be_hashed_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def triton_key() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(triton.runtime.cache, "triton_key", triton_key)
    with caplog.at_level("INFO"):
        hash_compiler()
    assert "compiler_not_hashed reason=OSError('no such file')" in caplog.text


def test_the_version_of_the_compiler_is_known_before_kernels_are_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(nvidia, "get_ptxas_version", lambda arch: asked.append(arch) or "13.0")
    monkeypatch.setattr(triton.runtime.driver, "_active", TargetDriver(90))
    with caplog.at_level("INFO"):
        prepare_to_load()
        assert asked == [90]
        monkeypatch.setattr(triton.runtime.driver, "_active", object())
        prepare_to_load()
    assert "loading_not_prepared reason=AttributeError" in caplog.text
