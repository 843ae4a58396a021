"""Data directories of format 1, whose chunks were named by xxh3-128, brought up to date and back."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from typer.testing import CliRunner

from hearth.cli.commands import whole_app
from hearth.control import upgrade as control_upgrade
from hearth.control.datadir import VERSION, DataDir
from hearth.control.deploy import collect, opened_lock
from hearth.control.deployed import Deployed
from hearth.control.registry import Registry
from hearth.control.upgrade import roll_back, upgrade, upgrade_directory
from hearth.errors import BadCheckpoint, ChunkCorrupt, ChunkMissing, DataDirError, NameTaken
from hearth.models.layout import layout_of
from hearth.policy.fleet.footprint import Facts
from hearth.store.manifest import MANIFEST, WEIGHTS, Manifest, chunk_of, digest_of, read_manifest
from hearth.store.upgrade import read_old, upgraded
from hearth.store.verify import verify
from hearth.types import Rung
from tests.store.stored import ARCH, CHUNK_BYTES, all_chunks, consume, flip, serving, tiers_at

TEXT = b'{"a":\r\n "tokenizer \xff"}'  # as an editor elsewhere has left it
FACTS = Facts(
    num_bytes=1, wide_bytes=1, dtype="float32", quant="none", num_parameters=1, largest_bytes=1,
    dimensions=ARCH.dimensions, max_positions=64, eos_ids=(0,), has_chat_template=False,
)  # fmt: skip


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def write_old(directory: Path, seed: int = 0) -> bytes:
    """A model as format 1 had it; returns its bytes."""
    data = random.Random(seed).randbytes(layout_of(ARCH, "float32").num_bytes)
    parts = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    new = Manifest.of(
        ARCH, "float32", "none", tuple(map(chunk_of, parts)), CHUNK_BYTES, {"tokenizer.json": TEXT}
    )
    fields = json.loads(new.to_json())
    del fields["digest"]
    fields["version"] = 1
    fields["chunks"] = [{"digest": xxh3(part), "num_bytes": len(part)} for part in parts]
    fields["files"] = [{"name": "tokenizer.json", "digest": xxh3(TEXT), "num_bytes": len(TEXT)}]
    fields["digest"] = xxh3(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    directory.mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(data)
    (directory / "tokenizer.json").write_bytes(TEXT)
    (directory / MANIFEST).write_text(json.dumps(fields, indent=1))
    return data


def old_digest(directory: Path) -> str:
    old = read_old(directory)
    assert old is not None
    return old.digest


@contextmanager
def held(path: Path) -> Iterator[DataDir]:
    with DataDir.hold(path, may_be_old=True) as data_dir:
        yield data_dir


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A data directory of format 1 with models `a` and `b`, and `c` that lies elsewhere."""
    path = tmp_path / "data"
    with DataDir.hold(path) as data_dir, Registry.open(data_dir) as registry:
        for seed, name in enumerate("abc"):
            directory = tmp_path / "c" if name == "c" else data_dir.models_path / name
            write_old(directory, seed)
            registry.add(
                Deployed(name, f"./{name}", str(directory), str(directory), old_digest(directory), FACTS, 1.0)
            )
        data_dir.set_version(1)
    return path


def rows(path: Path) -> dict[str, str]:
    with Registry.open(DataDir(path)) as registry:
        return {model.name: model.digest for model in registry.all()}


def contents(root: Path) -> dict[str, bytes]:
    """All files of models and the version, by path."""
    paths = [root / "VERSION", *root.glob("models/*/*"), *root.parent.glob("c/*")]
    return {str(path): path.read_bytes() for path in paths}


def test_every_model_is_named_by_its_bytes_afterwards_and_loads(old: Path, tmp_path: Path) -> None:
    before = rows(old)
    with held(old) as data_dir:
        done = upgrade(data_dir)
        assert data_dir.version == VERSION
    assert [(model.name, model.old) for model in done] == list(before.items())
    assert rows(old) == {model.name: model.new for model in done}
    for name, directory in {"a": old / "models" / "a", "c": tmp_path / "c"}.items():
        assert read_manifest(directory).digest == rows(old)[name]
        assert verify(directory) == []
    with tiers_at(old) as tiers:
        model = tiers.open(old / "models" / "b")
        assert consume(tiers.fetch(model, all_chunks(model))) == (old / "models" / "b" / WEIGHTS).read_bytes()


def test_a_directory_of_this_format_is_left_alone(old: Path) -> None:
    with held(old) as data_dir:
        upgrade(data_dir)
        before = contents(old)
        assert upgrade(data_dir) == []
    assert contents(old) == before


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    with DataDir.hold(tmp_path) as data_dir:
        data_dir.set_version(VERSION + 1)
    with pytest.raises(
        DataDirError, match=rf"has version '{VERSION + 1}', this Hearth reads up to {VERSION}"
    ):
        DataDir.open(tmp_path, may_be_old=True)


def test_who_does_not_upgrade_is_told_how(old: Path) -> None:
    with pytest.raises(DataDirError, match=rf"has version 1, .*`hearth upgrade --data-dir {old}`"):
        DataDir.open(old)


class TestRollBack:
    def test_all_is_as_it_was(self, old: Path) -> None:
        before, digests = contents(old), rows(old)
        with held(old) as data_dir:
            upgrade(data_dir)
            assert contents(old) != before
            roll_back(data_dir)
        assert contents(old) == before
        assert rows(old) == digests

    def test_it_can_be_upgraded_again(self, old: Path) -> None:
        with held(old) as data_dir:
            first = upgrade(data_dir)
            roll_back(data_dir)
            assert upgrade(data_dir) == first

    def test_the_first_write_closes_the_way_back(self, old: Path) -> None:
        with held(old) as data_dir:
            upgrade(data_dir)
            with Registry.open(data_dir) as registry:
                registry.remove("a")
            with pytest.raises(DataDirError, match=r"cannot be rolled back: .*deployed or removed"):
                roll_back(data_dir)
            assert data_dir.version == VERSION

    def test_a_name_that_is_taken_closes_nothing(self, old: Path) -> None:
        with held(old) as data_dir:
            upgrade(data_dir)
            with Registry.open(data_dir) as registry, pytest.raises(NameTaken):
                registry.add(registry.all()[0])
            roll_back(data_dir)
            assert data_dir.version == 1

    def test_interrupted_it_is_done_again(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, digests = contents(old), rows(old)
        with held(old) as data_dir:
            upgrade(data_dir)
            with monkeypatch.context() as patch:
                patch.setattr(control_upgrade, "_put", stop)
                with pytest.raises(KeyboardInterrupt):
                    roll_back(data_dir)
            assert data_dir.version == 1
            roll_back(data_dir)
        assert contents(old) == before
        assert rows(old) == digests

    def test_what_was_deployed_between_two_upgrades_is_kept(
        self, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first way back was interrupted at its very end, and the older Hearth went on from there."""
        with held(old) as data_dir:
            upgrade(data_dir)
            with monkeypatch.context() as patch:
                patch.setattr(shutil, "rmtree", stop)
                with pytest.raises(KeyboardInterrupt):
                    roll_back(data_dir)
            directory = data_dir.models_path / "d"
            write_old(directory, seed=9)
            with Registry.open(data_dir) as registry:
                deployed = Deployed(
                    "d", "d", str(directory), str(directory), old_digest(directory), FACTS, 1.0
                )
                registry._put("insert", deployed)
            before, digests = contents(old), rows(old)
            assert "d" in digests
            upgrade(data_dir)
            roll_back(data_dir)
        assert contents(old) == before
        assert rows(old) == digests

    def test_what_was_never_upgraded_cannot_be(self, tmp_path: Path) -> None:
        with held(tmp_path) as data_dir, pytest.raises(DataDirError, match="it was not upgraded"):
            roll_back(data_dir)


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


class TestInterrupted:
    def test_a_model_that_only_the_second_run_could_read_is_saved_too(
        self, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, digests = contents(old), rows(old)
        hidden = old / "models" / "a" / WEIGHTS
        with held(old) as data_dir:
            hidden.rename(old / "elsewhere")
            with monkeypatch.context() as patch:
                patch.setattr(DataDir, "set_version", stop)
                with pytest.raises(KeyboardInterrupt):
                    upgrade(data_dir)
            (old / "elsewhere").rename(hidden)
            assert all(model.new is not None for model in upgrade(data_dir))
            roll_back(data_dir)
        assert contents(old) == before
        assert rows(old) == digests

    def test_a_garbled_note_is_not_believed(self, tmp_path: Path) -> None:
        write_old(tmp_path / "a")
        found = read_old(tmp_path / "a")
        assert found is not None
        wanted = upgraded(found, tmp_path / "notes")
        header, first, second, *rest = (tmp_path / "notes").read_text().split("\n")
        (tmp_path / "notes").write_text("\n".join([header, first, "\0" * len(second), *rest]))
        assert upgraded(found, tmp_path / "notes") == wanted

    def test_chunks_that_were_read_are_not_read_again(self, tmp_path: Path) -> None:
        write_old(tmp_path / "a")
        found = read_old(tmp_path / "a")
        assert found is not None
        seen: list[int] = []

        def read(index: int, offset: int, num_bytes: int, xxh3: str) -> bytes:
            seen.append(index)
            if index == 5 and seen.count(5) == 1:
                raise ChunkMissing("pulled the plug")
            return (tmp_path / "a" / WEIGHTS).read_bytes()[offset : offset + num_bytes]

        with pytest.raises(ChunkMissing, match="plug"):
            upgraded(found, tmp_path / "notes", read)
        seen_before = len(seen)
        manifest = upgraded(found, tmp_path / "notes", read)
        assert sorted(seen[seen_before:])[0] == 5  # all before were noted
        assert manifest.chunks[0] == chunk_of((tmp_path / "a" / WEIGHTS).read_bytes()[:CHUNK_BYTES])
        assert manifest == upgraded(found, tmp_path / "other notes")

    @pytest.mark.parametrize("cut", [0, 1, 40, 200, 230])
    def test_notes_that_were_cut_short_are_used_up_to_there(self, tmp_path: Path, cut: int) -> None:
        write_old(tmp_path / "a")
        found = read_old(tmp_path / "a")
        assert found is not None
        wanted = upgraded(found, tmp_path / "notes")
        notes = (tmp_path / "notes").read_bytes()
        (tmp_path / "notes").write_bytes(notes[: len(notes) - cut])
        assert upgraded(found, tmp_path / "notes") == wanted
        assert (tmp_path / "notes").read_bytes() == notes

    def test_notes_of_another_state_of_the_file_are_not_used(self, tmp_path: Path) -> None:
        write_old(tmp_path / "a")
        found = read_old(tmp_path / "a")
        assert found is not None
        upgraded(found, tmp_path / "notes")
        flip(tmp_path / "a" / WEIGHTS, 0)
        with pytest.raises(ChunkCorrupt, match="chunk 0 of"):
            upgraded(found, tmp_path / "notes")

    @pytest.mark.parametrize("step", ["_save", "_write", "_write_manifest", "set_version"])
    def test_the_next_run_goes_on_and_the_way_back_is_whole(
        self, old: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        before, digests = contents(old), rows(old)
        with held(old) as data_dir:
            with monkeypatch.context() as patch:
                if step == "set_version":
                    patch.setattr(DataDir, step, stop)
                else:
                    patch.setattr(control_upgrade, step, stop)
                with pytest.raises(KeyboardInterrupt):
                    upgrade(data_dir)
            assert data_dir.version == 1
            done = upgrade(data_dir)
            assert rows(old) == {model.name: model.new for model in done}
            roll_back(data_dir)
        assert contents(old) == before
        assert rows(old) == digests


def test_a_damaged_model_stays_as_it_was_and_the_others_are_upgraded(old: Path) -> None:
    flip(old / "models" / "a" / WEIGHTS, CHUNK_BYTES)
    shutil.rmtree(old / "models" / "b")
    with held(old) as data_dir:
        a, b, c = upgrade(data_dir)
    assert (a.new, b.new) == (None, None)
    assert "chunk 1 of" in a.reason
    assert c.new is not None
    assert old_digest(old / "models" / "a") == rows(old)["a"]


def test_a_model_whose_disk_fails_or_whose_directory_is_anothers_does_not_stop_the_rest(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, is_broken = os.pread, (old / "models" / "a" / WEIGHTS).stat().st_ino

    def pread(file: int, *rest: int) -> bytes:
        if os.fstat(file).st_ino == is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(file, *rest)

    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "c")
    with held(old) as data_dir:
        a, b, c = upgrade(data_dir)
        assert data_dir.version == VERSION
    assert "Input/output error" in a.reason
    assert b.new is not None
    assert "may not be written" in c.reason


def test_nobody_deploys_meanwhile(old: Path) -> None:
    with held(old) as data_dir, opened_lock(data_dir) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as a deployment does
        with pytest.raises(DataDirError, match="models are being deployed"):
            upgrade(data_dir)
        assert data_dir.version == 1


def test_bytes_that_were_read_need_not_be_checked_by_their_digest_again(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(old) as data_dir:
        upgrade(data_dir)
    monkeypatch.setattr("hearth.store.verified_read.digest_of", lambda _: pytest.fail("BLAKE3 again"))
    with tiers_at(old) as tiers:
        model = tiers.open(old / "models" / "a")
        consume(tiers.fetch(model, all_chunks(model)))


class TestUrl:
    """A model in object storage: its description is here, and perhaps some of its chunks."""

    @pytest.fixture
    def remote(self, tmp_path: Path) -> Iterator[tuple[Path, str, bytes]]:
        """A data directory of format 1 with one such model, its URL and its bytes."""
        data = write_old(tmp_path / "made" / "tiny")
        with serving(tmp_path / "made" / "tiny") as server:
            path, url = tmp_path / "data", f"{server.url}/tiny"
            with DataDir.hold(path) as data_dir, Registry.open(data_dir) as registry:
                directory = data_dir.models_path / "tiny-0123"
                shutil.copytree(tmp_path / "made" / "tiny", directory)
                (directory / WEIGHTS).unlink()
                for part in (data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES]):
                    chunk = path / "chunks" / xxh3(part)[:2] / xxh3(part)
                    chunk.parent.mkdir(parents=True, exist_ok=True)
                    chunk.write_bytes(part)
                registry.add(Deployed("r", url, url, str(directory), old_digest(directory), FACTS, 1.0))
                data_dir.set_version(1)
            yield path, url, data

    def test_all_bytes_are_read_and_the_version_is_served_from_then_on(
        self, remote: tuple[Path, str, bytes]
    ) -> None:
        path, url, data = remote
        with held(path) as data_dir:
            (done,) = upgrade(data_dir)
            with Registry.open(data_dir) as registry:
                (model,) = registry.all()
        assert model.where == f"{url}@{done.new}"
        with tiers_at(path) as tiers:
            opened = tiers.open(model.where)
            assert str(opened.directory) == model.directory
            assert tiers.resident_bytes(opened)[Rung.DISK] == 2 * CHUNK_BYTES  # what was cached still is
            assert consume(tiers.fetch(opened, all_chunks(opened))) == data

    def test_the_way_back_is_whole_though_a_service_has_run(self, remote: tuple[Path, str, bytes]) -> None:
        path, _, _ = remote
        before = {str(p): p.read_bytes() for p in [*path.glob("models/*/*"), *path.glob("chunks/*/*")]}
        with held(path) as data_dir:
            upgrade(data_dir)
            with Registry.open(data_dir) as registry:
                (model,) = registry.all()
                collect(data_dir, registry)  # as a service does that starts
            with tiers_at(path) as tiers:
                opened = tiers.open(model.where)
                consume(tiers.fetch(opened, all_chunks(opened)))
            roll_back(data_dir)
        after = {str(p): p.read_bytes() for p in [*path.glob("models/*/*"), *path.glob("chunks/*/*")]}
        assert {name: after[name] for name in before} == before
        fetched = [name for name in after if name not in before]  # since, and kept: the older one finds it
        assert {Path(name).name for name in fetched} == {xxh3(after[name]) for name in fetched}

    def test_chunks_that_nobody_refers_to_are_collected_afterwards(
        self, remote: tuple[Path, str, bytes]
    ) -> None:
        path, _, _ = remote
        with held(path) as data_dir:
            upgrade(data_dir)
            with Registry.open(data_dir) as registry:
                (model,) = registry.all()
        with tiers_at(path) as tiers:
            tiers.forget(model.where)
        assert not list(path.glob("chunks/*/*"))

    def test_a_cached_chunk_that_another_model_may_have_brought_is_not_believed(
        self, remote: tuple[Path, str, bytes], tmp_path: Path
    ) -> None:
        """Under its name may lie other bytes of the same xxh3; the model's own URL has the right ones."""
        path, _, data = remote
        write_old(path / "models" / "other")
        with DataDir.hold(path, may_be_old=True) as data_dir:
            with Registry.open(data_dir) as registry:
                other = path / "models" / "other"
                registry.add(Deployed("o", "./o", str(other), str(other), old_digest(other), FACTS, 1.0))
            (cached,) = path.glob(f"chunks/*/{xxh3(data[:CHUNK_BYTES])}")
            cached.unlink()
            cached.symlink_to("/dev/full")  # whoever opens it learns nothing
            done = {model.name: model for model in upgrade(data_dir)}
        assert done["r"].new == done["o"].new


class TestCommand:
    def test_a_single_model_is_upgraded(self, tmp_path: Path) -> None:
        write_old(tmp_path / "a")
        (tmp_path / "a" / MANIFEST).chmod(0o640)
        with pytest.raises(BadCheckpoint, match=r"has version 1, .*`hearth upgrade`"):
            read_manifest(tmp_path / "a")
        result = CliRunner().invoke(whole_app(), ["upgrade", str(tmp_path / "a")])
        assert (result.exit_code, result.output.splitlines()[-1][:8]) == (0, "upgraded")
        assert verify(tmp_path / "a") == []
        assert (tmp_path / "a" / MANIFEST).stat().st_mode & 0o777 == 0o640
        assert upgrade_directory(tmp_path / "a") is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]

    def test_a_data_directory_goes_there_and_back(self, old: Path) -> None:
        before = contents(old)
        there = CliRunner().invoke(whole_app(), ["upgrade", "--data-dir", str(old)])
        assert (there.exit_code, there.output.count("upgraded")) == (0, 3)
        again = CliRunner().invoke(whole_app(), ["upgrade", "--data-dir", str(old)])
        assert "is up to date: version 2" in again.output
        back = CliRunner().invoke(whole_app(), ["upgrade", "--rollback", "--data-dir", str(old)])
        assert (back.exit_code, contents(old)) == (0, before)


def test_the_digest_of_a_text_file_is_its_bytes(old: Path) -> None:
    with held(old) as data_dir:
        upgrade(data_dir)
    (file,) = read_manifest(old / "models" / "a").files
    assert file.digest == digest_of(TEXT)
