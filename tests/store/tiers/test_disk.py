"""The disk tier over real files: what it finds, keeps, evicts and leaves behind, under any order of calls."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hearth.core.errors import StoreError, StoreFull
from hearth.core.types import ChunkId
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Manifest, chunk_of
from hearth.store.tiers.disk import TEMPORARY_MAX_AGE_S, DiskCounters, DiskLocation, DiskTier

TINY = {"num_hidden_layers": 1, "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}
ARCH = arch_from_config({"model_type": "llama", **TINY, "intermediate_size": 8})
CHUNK_BYTES = 8192
WEIGHTS_BYTES = layout_of(ARCH, "float32").num_bytes


def write_model(directory: Path, seed: int = 0, *, has_weights: bool = True) -> Manifest:
    """A model of random bytes; `has_weights=False` is one whose chunks are in object storage."""
    data = random.Random(seed).randbytes(WEIGHTS_BYTES)
    parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    chunks = tuple(map(chunk_of, parts))
    manifest = Manifest.of(ARCH, "float32", "none", chunks, CHUNK_BYTES, {})
    directory.mkdir(parents=True)
    (directory / MANIFEST).write_text(manifest.to_json())
    if has_weights:
        (directory / WEIGHTS).write_bytes(data)
    return manifest


def chunk(number: int, num_bytes: int = 1000) -> bytes:
    return number.to_bytes(2, "big") * (num_bytes // 2)


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def free_of_charge(chunk_id: str) -> float:
    return 0.0


def keep(tier: DiskTier, data: bytes) -> ChunkId:
    chunk_id = chunk_of(data).id
    assert tier.keep(chunk_id, xxh3(data), memoryview(data), free_of_charge)
    return chunk_id


def read(location: DiskLocation) -> bytes:
    with location.path.open("rb") as file:
        file.seek(location.offset)
        return file.read(location.num_bytes)


def files_under(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def stored_bytes(root: Path) -> int:
    """What chunks and weights really take."""
    return sum(path.stat().st_size for path in files_under(root) if path.name != MANIFEST)


@contextmanager
def file_size_limit(max_bytes: int) -> Iterator[None]:
    """The system refuses to write past `max_bytes` of any file (EFBIG, as Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_finds_every_chunk_of_a_model_under_the_root(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path)
    for part in manifest.chunks:
        (location,) = tier.locate(part.id)
        assert chunk_of(read(location)) == part


def test_a_model_without_weights_has_no_places(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny", has_weights=False)
    tier = DiskTier(tmp_path)
    assert tier.locate(manifest.chunk_ids[0]) == []
    assert tier.used_bytes == 0


def test_an_unreadable_manifest_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_model(tmp_path / "models" / "good")
    write_model(tmp_path / "models" / "bad")
    (tmp_path / "models" / "bad" / MANIFEST).write_text("{")
    write_model(tmp_path / "models" / "odd")
    (tmp_path / "models" / "odd" / MANIFEST).write_text(manifest.to_json().replace("float32", "float3"))

    tier = DiskTier(tmp_path)

    assert [location.path.parent.name for location in tier.locate(manifest.chunk_ids[0])] == ["good"]
    assert [record.getMessage().split()[0] for record in caplog.records] == 2 * ["model_skipped"]
    assert "models/bad" in caplog.text


def test_a_model_that_is_being_converted_is_not_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = write_model(tmp_path / "models" / ".tiny.converting")
    assert DiskTier(tmp_path).locate(manifest.chunk_ids[0]) == []
    assert caplog.records == []


def test_a_model_outside_the_root_is_found_until_it_is_forgotten(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "elsewhere")
    tier = DiskTier(tmp_path / "root")
    tier.register(tmp_path / "elsewhere", manifest)
    (location,) = tier.locate(manifest.chunk_ids[1])
    tier.forget(tmp_path / "elsewhere")
    assert location == DiskLocation(tmp_path / "elsewhere" / WEIGHTS, CHUNK_BYTES, CHUNK_BYTES)
    assert tier.locate(manifest.chunk_ids[1]) == []


def test_registering_a_model_again_finds_its_chunks_once(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path)
    tier.register(tmp_path / "models" / "tiny", manifest)
    assert len(tier.locate(manifest.chunk_ids[0])) == 1
    assert tier.used_bytes == WEIGHTS_BYTES


def test_a_kept_chunk_is_found_before_any_weights_and_after_a_restart(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny", has_weights=False)
    write_model(tmp_path / "elsewhere")
    data = (tmp_path / "elsewhere" / WEIGHTS).read_bytes()[:CHUNK_BYTES]
    keep(DiskTier(tmp_path), data)

    tier = DiskTier(tmp_path)
    tier.register(tmp_path / "elsewhere", manifest)
    own, shared = tier.locate(manifest.chunk_ids[0])

    assert (read(own), own.offset, own.num_bytes) == (data, 0, CHUNK_BYTES)
    assert shared.path == tmp_path / "elsewhere" / WEIGHTS


def test_a_chunk_that_is_on_the_disk_is_not_kept_again(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    data = (tmp_path / "models" / "tiny" / WEIGHTS).read_bytes()[:CHUNK_BYTES]
    tier = DiskTier(tmp_path)
    keep(tier, chunk(1))
    before = files_under(tmp_path)

    assert not tier.keep(chunk_of(data).id, xxh3(data), memoryview(data), free_of_charge)
    assert not tier.keep(chunk_of(chunk(1)).id, xxh3(chunk(1)), memoryview(chunk(1)), free_of_charge)
    assert files_under(tmp_path) == before


def test_a_view_of_other_items_than_bytes_is_kept_whole(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    assert tier.keep(chunk_of(chunk(1)).id, xxh3(chunk(1)), memoryview(chunk(1)).cast("i"), free_of_charge)
    assert tier.used_bytes == stored_bytes(tmp_path) == 1000


def test_what_a_killed_writer_left_is_no_chunk_and_is_removed_in_time(tmp_path: Path) -> None:
    chunk_id = keep(DiskTier(tmp_path), chunk(1))
    (file,) = files_under(tmp_path)
    fresh, old = file.with_name(f".{chunk_id}.0"), file.with_name(f".{chunk_id}.1")
    file.rename(fresh)
    old.write_bytes(b"half")
    written_s = time.time() - TEMPORARY_MAX_AGE_S - 60
    os.utime(old, (written_s, written_s))

    tier = DiskTier(tmp_path)

    assert tier.locate(chunk_id) == []
    assert files_under(tmp_path) == [fresh]


def test_a_stranger_among_the_chunks_is_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / "chunks" / "RE" / "README"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("hands off")
    tier = DiskTier(tmp_path)
    assert (tier.collect(), tier.used_bytes) == (0, 0)
    assert stranger.exists()


def test_the_quota_evicts_the_cheapest_chunks_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota_bytes=3000)
    chunk_ids = [keep(tier, chunk(number)) for number in range(3)]
    price: dict[str, float] = dict(zip(chunk_ids, [2.0, 1.0, 3.0], strict=True))
    large = chunk(9, 2000)
    assert tier.keep(chunk_of(large).id, xxh3(large), memoryview(large), price.__getitem__)
    assert [len(tier.locate(chunk_id)) for chunk_id in chunk_ids] == [0, 0, 1]
    assert tier.used_bytes == stored_bytes(tmp_path) == 3000


def test_a_chunk_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota_bytes=3000)
    chunk_id = keep(tier, chunk(1))
    with pytest.raises(StoreFull, match=r"chunk of 3002 bytes .* 1000 bytes of 3000 are used"):
        keep(tier, chunk(2, 3002))
    assert len(tier.locate(chunk_id)) == 1
    assert tier.used_bytes == 1000


def test_weights_count_into_the_quota_but_are_never_evicted(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path, quota_bytes=WEIGHTS_BYTES + 1000)
    keep(tier, chunk(1))
    keep(tier, chunk(2))
    with pytest.raises(StoreFull):
        keep(tier, chunk(3, 1002))
    assert tier.used_bytes == stored_bytes(tmp_path) == WEIGHTS_BYTES + 1000


def test_a_forgotten_model_leaves_the_quota(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path, quota_bytes=WEIGHTS_BYTES)
    tier.forget(tmp_path / "models" / "tiny")
    shutil.rmtree(tmp_path / "models" / "tiny")
    keep(tier, chunk(1))
    assert tier.used_bytes == stored_bytes(tmp_path) == 1000


def test_weights_outside_the_root_do_not_count(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "root", quota_bytes=1000)
    tier.register(tmp_path / "elsewhere", write_model(tmp_path / "elsewhere"))
    keep(tier, chunk(1))
    assert tier.used_bytes == 1000


def test_a_reader_keeps_the_bytes_of_an_evicted_chunk(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota_bytes=1000)
    (location,) = tier.locate(keep(tier, chunk(1)))
    with location.path.open("rb") as file:
        keep(tier, chunk(2))
        assert not location.path.exists()
        assert file.read() == chunk(1)


def test_a_file_the_system_refuses_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    with file_size_limit(4096), pytest.raises(StoreFull, match="chunk of 10000 bytes"):
        keep(tier, chunk(1, 10_000))
    assert files_under(tmp_path) == []
    assert tier.used_bytes == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    tier = DiskTier(tmp_path)
    with pytest.raises(StoreFull, match=os.strerror(code)):
        keep(tier, chunk(1))
    assert files_under(tmp_path) == []
    assert tier.used_bytes == 0


def test_after_a_failed_write_the_chunk_can_be_kept(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota_bytes=10_000)
    with file_size_limit(4096), pytest.raises(StoreFull):
        keep(tier, chunk(1, 10_000))
    keep(tier, chunk(1, 10_000))
    assert stored_bytes(tmp_path) == 10_000


def test_a_place_that_cannot_be_written_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("a file where a directory should be")
    with pytest.raises(StoreError, match="cannot be written"):
        keep(DiskTier(tmp_path), chunk(1))


def test_a_condemned_chunk_file_is_deleted_and_can_be_kept_anew(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    (location,) = tier.locate(keep(tier, chunk(1)))
    tier.condemn(location)
    assert files_under(tmp_path) == []
    assert tier.used_bytes == 0
    keep(tier, chunk(1))


def test_a_condemned_place_in_weights_is_left_out_until_registered_again(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path)
    bad, good = manifest.chunk_ids[1], manifest.chunk_ids[2]
    (location,) = tier.locate(bad)
    tier.condemn(location)
    assert [len(tier.locate(chunk_id)) for chunk_id in (bad, good)] == [0, 1]
    tier.register(tmp_path / "models" / "tiny", manifest)
    assert tier.locate(bad) == [location]


def test_a_condemned_place_in_weights_lets_the_chunk_be_kept(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path)
    (location,) = tier.locate(manifest.chunk_ids[0])
    data = read(location)
    tier.condemn(location)
    keep(tier, data)
    assert [read(place) for place in tier.locate(manifest.chunk_ids[0])] == [data]


def test_condemning_twice_is_harmless_and_counted_once(tmp_path: Path) -> None:
    manifest = write_model(tmp_path / "models" / "tiny")
    tier = DiskTier(tmp_path)
    places = [*tier.locate(keep(tier, chunk(1))), *tier.locate(manifest.chunk_ids[0])]
    for location in places * 2:
        tier.condemn(location)
    assert tier.counters.num_condemned == 2


def test_collects_the_chunks_that_no_model_refers_to(tmp_path: Path) -> None:
    write_model(tmp_path / "whole")
    data = (tmp_path / "whole" / WEIGHTS).read_bytes()
    write_model(tmp_path / "models" / "tiny", has_weights=False)
    tier = DiskTier(tmp_path)
    wanted = keep(tier, data[:CHUNK_BYTES])
    garbage = keep(tier, chunk(1))

    assert tier.collect() == 1000

    assert [len(tier.locate(chunk_id)) for chunk_id in (wanted, garbage)] == [1, 0]
    assert tier.used_bytes == CHUNK_BYTES


def test_collects_nothing_while_a_description_cannot_be_read(tmp_path: Path) -> None:
    write_model(tmp_path / "whole")
    data = (tmp_path / "whole" / WEIGHTS).read_bytes()
    write_model(tmp_path / "models" / "tiny", has_weights=False)
    whole = (tmp_path / "models" / "tiny" / MANIFEST).read_text()
    (tmp_path / "models" / "tiny" / MANIFEST).write_text(whole[:100])
    tier = DiskTier(tmp_path)
    cached = keep(tier, data[:CHUNK_BYTES])

    assert tier.collect() == 0

    assert len(tier.locate(cached)) == 1
    (tmp_path / "models" / "tiny" / MANIFEST).write_text(whole)
    assert tier.collect() == 0
    assert len(tier.locate(cached)) == 1


def test_a_model_that_arrived_unregistered_keeps_its_chunks(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "root")
    write_model(tmp_path / "whole")
    chunk_id = keep(tier, (tmp_path / "whole" / WEIGHTS).read_bytes()[:CHUNK_BYTES])
    write_model(tmp_path / "root" / "models" / "tiny", has_weights=False)
    assert tier.collect() == 0
    assert len(tier.locate(chunk_id)) == 1


def test_counts_what_it_does(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, quota_bytes=2000)
    for number in range(3):
        tier.locate(keep(tier, chunk(number)))
    tier.locate(ChunkId("absent"))
    tier.collect()
    assert tier.counters == DiskCounters(
        num_hits=3, num_kept=3, num_evicted=1, num_collected=2, kept_bytes=3000, evicted_bytes=1000
    )


def test_four_threads_never_exceed_the_quota_nor_mix_up_chunks(tmp_path: Path) -> None:
    chunks = [chunk(number, 500 + 100 * number) for number in range(12)]
    tier = DiskTier(tmp_path, quota_bytes=4000)

    def work(seed: int) -> None:
        choices = random.Random(seed)
        for _ in range(60):
            data = choices.choice(chunks)
            with suppress(StoreFull):  # the others may be writing that much right now
                tier.keep(chunk_of(data).id, xxh3(data), memoryview(data), lambda _: choices.random())
            assert tier.used_bytes <= 4000
            for location in tier.locate(chunk_of(data).id):
                if choices.random() < 0.1:
                    tier.condemn(location)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result()

    assert tier.counters.num_evicted > 0
    assert tier.used_bytes == stored_bytes(tmp_path)
    assert all(
        f"{chunk_of(data := path.read_bytes()).id}-{xxh3(data)}" == path.name
        for path in files_under(tmp_path)
    )


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Books and disk agree, the quota holds, and every place that is named has the right bytes."""

    CHUNKS = tuple(chunk(number, 400 + 200 * number) for number in range(6))
    QUOTA_BYTES = WEIGHTS_BYTES + 2500
    numbers = st.integers(0, len(CHUNKS) - 1)

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()).resolve()
        self.model = self.root / "models" / "tiny"
        self.manifest = write_model(self.model)
        self.tier = DiskTier(self.root, self.QUOTA_BYTES)

    @rule(number=numbers, prices=st.lists(st.integers(0, 3), min_size=6, max_size=6))
    def keep(self, number: int, prices: list[int]) -> None:
        data = self.CHUNKS[number]
        price: dict[str, int] = dict(zip((chunk_of(part).id for part in self.CHUNKS), prices, strict=True))
        was_there = bool(self.tier.locate(chunk_of(data).id))
        assert self.tier.keep(chunk_of(data).id, xxh3(data), memoryview(data), price.__getitem__) != was_there
        assert len(self.tier.locate(chunk_of(data).id)) == 1

    @rule()
    def keep_too_much(self) -> None:
        with pytest.raises(StoreFull):
            keep(self.tier, chunk(99, 2502))

    @rule(number=numbers)
    def fail_to_write(self, number: int) -> None:
        data = self.CHUNKS[number]
        if not self.tier.locate(chunk_of(data).id):
            with file_size_limit(len(data) // 2), pytest.raises(StoreFull):
                keep(self.tier, data)
            assert self.tier.locate(chunk_of(data).id) == []

    @rule(number=numbers)
    def condemn_file(self, number: int) -> None:
        chunk_id = chunk_of(self.CHUNKS[number]).id
        for location in self.tier.locate(chunk_id):
            self.tier.condemn(location)
        assert self.tier.locate(chunk_id) == []

    @rule(number=st.integers(0, 2))
    def condemn_weights(self, number: int) -> None:
        chunk_id = self.manifest.chunk_ids[number]
        for location in self.tier.locate(chunk_id):
            self.tier.condemn(location)
        assert self.tier.locate(chunk_id) == []

    @rule()
    def register(self) -> None:
        self.tier.register(self.model, self.manifest)
        assert all(self.tier.locate(part.id) for part in self.manifest.chunks)

    @rule()
    def collect(self) -> None:
        freed_bytes = self.tier.used_bytes - WEIGHTS_BYTES
        assert self.tier.collect() == freed_bytes

    @rule()
    def restart(self) -> None:
        self.tier = DiskTier(self.root, self.QUOTA_BYTES)

    @invariant()
    def books_and_disk_agree(self) -> None:
        assert self.tier.used_bytes == stored_bytes(self.root)
        assert self.tier.used_bytes <= self.QUOTA_BYTES
        chunk_ids = [*(chunk_of(part).id for part in self.CHUNKS), *self.manifest.chunk_ids]
        for chunk_id in chunk_ids:
            assert all(chunk_of(read(location)).id == chunk_id for location in self.tier.locate(chunk_id))

    def teardown(self) -> None:
        shutil.rmtree(self.root)


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCalls.settings = settings(stateful_step_count=25)
