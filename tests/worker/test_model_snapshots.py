"""The fingerprint of a start, from the things themselves that it is made of. Hosts nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hearth.control.observe.pool_views import FALLBACKS
from hearth.core.config import EngineConfig
from hearth.core.types import SnapshotOutcome
from hearth.engine.engine import Engine
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import Space
from hearth.models.weights import TensorPlace
from hearth.snapshot import memory_profile
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.file import write_snapshot
from hearth.snapshot.fingerprint import Fingerprint
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.snapshot.parts import SnapshotParts
from hearth.snapshot.software import Software
from hearth.store.format.manifest import read_manifest
from hearth.worker import model_snapshots
from hearth.worker.hosting_spec import HostingSpec, hosting_spec
from hearth.worker.model_snapshots import ModelSnapshots, SnapshotLook, no_parts
from tests.snapshot.fingerprints import OTHER_KEY
from tests.store.stored import converted, tiers_at
from tests.worker.harness import BUDGET_BYTES, host_order
from tests.worker.in_process import working_in_process

MEMORY = {memory_profile.SECTION: MemoryProfile(1, 2, 3).pack()}
SOFTWARE = Software("570.86", "13.0", "13.1.0", "2.11.0", "3.6.0", "abc")


@dataclass(slots=True)
class Start:
    """All that a start on a CUDA device is looked at for. Mutable: a test changes one thing."""

    spec: HostingSpec
    directory: SnapshotDirectory
    memory: torch.Tensor = field(default_factory=lambda: torch.zeros(4096, dtype=torch.uint8))
    offsets: dict[str, int] = field(
        default_factory=lambda: {"weights": 0, "workspace": 1024, "tables": 2048, "kv": 3072}
    )
    config: EngineConfig = field(default_factory=EngineConfig)
    device_name: str = "NVIDIA H200"
    device_bytes: int = 141 << 30
    software: Software = SOFTWARE
    parts_of: Callable[[Engine], SnapshotParts | None] = lambda engine: None

    def fingerprint(self) -> Fingerprint:
        fingerprint = self.look().fingerprint
        assert fingerprint is not None
        return fingerprint

    def snapshots(self, kind: str = "cuda") -> ModelSnapshots:
        device = torch.device(kind)
        return ModelSnapshots(
            self.directory, self.config, device, self.device_name, self.device_bytes, self.parts_of
        )

    def look(self) -> SnapshotLook:
        engine: Any = SimpleNamespace()
        return self.snapshots().look(self.spec, self.space(), engine, lambda reason: None)

    def space(self) -> Space:
        ranges = {name: self.memory[at:] for name, at in self.offsets.items() if name != "weights"}
        place = TensorPlace(self.memory, self.offsets["weights"])
        return Space({"embed": place}, **ranges, sink=0, gaps=(), parts=())


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    found = Start(spec_of("llama-gqa"), SnapshotDirectory.open(tmp_path / "snapshots", 1 << 20))
    monkeypatch.setattr(model_snapshots, "software", lambda kind: found.software)
    return found


def spec_of(model: str) -> HostingSpec:
    order = host_order("a", converted(model), slot=7)
    return hosting_spec(order, read_manifest(converted(model)), None, torch.device("cpu"))


def with_model(start: Start, **changes: Any) -> None:
    start.spec = replace(start.spec, model=replace(start.spec.model, **changes))


def with_limits(start: Start, **changes: int) -> None:
    with_model(start, limits=replace(start.spec.model.limits, **changes))


def with_software(start: Start, **changes: str) -> None:
    start.software = replace(start.software, **changes)


def with_more_layers(start: Start) -> None:
    arch = start.spec.model.arch
    with_model(start, arch=replace(arch, num_layers=arch.num_layers + 1))


def with_manifest(start: Start) -> None:
    start.spec = replace(start.spec, manifest=read_manifest(converted("llama-gqa", quant="int8")))


def with_slot(start: Start) -> None:
    start.spec = replace(start.spec, shape=replace(start.spec.shape, slot=8))


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        pytest.param(with_manifest, {"manifest"}, id="manifest"),
        pytest.param(with_more_layers, {"layers"}, id="layers"),
        pytest.param(with_slot, {"addresses"}, id="slot"),
        *(
            pytest.param(lambda start, name=name: start.offsets.update({name: 512}), {"addresses"}, id=name)
            for name in ("weights", "workspace", "tables", "kv")
        ),
        pytest.param(lambda start: with_model(start, dtype=torch.bfloat16), {"dtype"}, id="dtype"),
        pytest.param(lambda start: with_model(start, max_context=32), {"limits"}, id="context"),
        pytest.param(lambda start: with_limits(start, max_seqs=3), {"limits"}, id="sequences of a step"),
        pytest.param(
            lambda start: with_limits(start, max_batch_tokens=48), {"limits"}, id="tokens of a step"
        ),
        pytest.param(lambda start: with_limits(start, block_tokens=8), {"limits"}, id="blocks of KV"),
        pytest.param(
            lambda start: setattr(start, "config", EngineConfig(graphs="off")), {"engine"}, id="graphs"
        ),
        pytest.param(lambda start: setattr(start, "parts_of", no_parts), {"engine"}, id="graphs not kept"),
        pytest.param(lambda start: setattr(start, "device_name", "NVIDIA A100"), {"device"}, id="device"),
        pytest.param(lambda start: setattr(start, "device_bytes", 80 << 30), {"device_bytes"}, id="memory"),
        *(
            pytest.param(lambda start, name=name: with_software(start, **{name: "other"}), {name}, id=name)
            for name in (one.name for one in fields(Software))
        ),
    ],
)
def test_each_thing_that_a_snapshot_depends_on_is_a_difference_of_its_own(
    start: Start, change: Callable[[Start], object], fields: set[str]
) -> None:
    before = start.fingerprint()
    assert start.fingerprint() == before
    change(start)
    after = start.fingerprint()
    assert {one.name for one in before.differences(after)} == fields
    assert after.digest != before.digest


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(kv_bytes=1 << 20),
        EngineConfig(memory_fraction=0.5),
        EngineConfig(max_step=0.01),
        EngineConfig(graphs="start"),
    ],
    ids=["KV", "memory", "longest step", "when graphs are captured"],
)
def test_settings_that_change_no_step_leave_the_fingerprint_as_it_is(
    start: Start, config: EngineConfig
) -> None:
    before = start.fingerprint()
    start.config = config
    assert start.fingerprint() == before


def test_every_setting_of_the_engine_is_known_to_change_steps_or_not() -> None:
    """One that comes new has to be a part of the fingerprint, or of the list above."""
    in_limits = {"max_batch_tokens", "max_seqs", "block_tokens"}
    in_vain = {"kv_bytes", "memory_fraction", "max_step"}
    assert {one.name for one in fields(EngineConfig)} == in_limits | in_vain | {"graphs"}


def test_the_slot_can_be_read_from_the_fingerprint(start: Start) -> None:
    assert start.fingerprint().slot == 7


def test_a_snapshot_of_another_start_under_the_name_of_this_one_is_refused(start: Start) -> None:
    """As where somebody has copied an authentic file: what it was made for is in the file."""
    fingerprint = start.fingerprint()
    older = start.directory.save(replace(fingerprint, driver="1"), MEMORY)
    older.rename(start.directory.path_of(fingerprint))
    look = start.look()
    assert look.outcome is SnapshotOutcome.REFUSED
    assert look.memory is None
    assert "`driver` is 570.86 here and 1 there" in str(look.reason)
    start.directory.save(fingerprint, MEMORY)
    assert start.look().outcome is SnapshotOutcome.USED


def flip_last_bit(start: Start, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def be_a_pipe(start: Start, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_elsewhere(start: Start, path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def write_other(start: Start, path: Path, sections: dict[str, bytes], key: bytes | None = None) -> None:
    write_snapshot(path, start.fingerprint(), sections, key or start.directory.key)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda _, path: os.truncate(path, path.stat().st_size - 1), "should have"),
        (lambda _, path: os.truncate(path, 0), "should have"),
        (flip_last_bit, "is damaged"),
        (lambda _, path: path.write_bytes(bytes(4096)), "is not a snapshot"),
        (lambda _, path: path.chmod(0o666), "can write, and is of"),
        (link_elsewhere, "cannot be read"),
        (be_a_pipe, "must be a file"),
        (lambda start, path: write_other(start, path, MEMORY, OTHER_KEY), "not written by this installation"),
        (lambda start, path: write_other(start, path, {}), "no memory profile"),
        (
            lambda start, path: write_other(start, path, {memory_profile.SECTION: b"[" * 9999}),
            "no memory profile",
        ),
    ],
    ids=["short", "empty", "flipped", "zeros", "mode", "link", "pipe", "foreign", "nothing in it", "nested"],
)
def test_a_file_that_must_not_be_used_is_refused_with_a_reason_and_replaced(
    start: Start, spoil: Callable[..., object], reason: str
) -> None:
    path = start.directory.save(start.fingerprint(), MEMORY)
    assert start.look().outcome is SnapshotOutcome.USED
    spoil(start, path)
    look = start.look()
    assert (look.outcome, look.memory) == (SnapshotOutcome.REFUSED, None)
    assert reason in str(look.reason)
    assert look.fingerprint is not None
    start.directory.save(look.fingerprint, MEMORY)
    assert start.look().outcome is SnapshotOutcome.USED


def test_a_start_that_finds_only_files_of_another_key_or_hearth_tells_why_it_uses_none(start: Start) -> None:
    fingerprint = start.fingerprint()
    path = start.directory.save(replace(fingerprint, driver="1"), MEMORY)
    write_snapshot(path, replace(fingerprint, driver="1"), MEMORY, OTHER_KEY)
    look = start.look()
    assert look.outcome is SnapshotOutcome.REFUSED
    assert "not written by this installation" in str(look.reason)
    start.directory.save(fingerprint, MEMORY)
    assert start.directory.entries() == start.directory.entries(fingerprint.manifest)
    assert not path.exists()


def test_a_worker_whose_snapshots_have_no_graphs_tells_of_it(start: Start, tmp_path: Path) -> None:
    assert not start.snapshots().lacks_graphs
    start.parts_of = no_parts
    unkept = start.snapshots()
    assert unkept.lacks_graphs
    assert not start.snapshots("cpu").lacks_graphs, "there are none"
    device = torch.device("cpu")
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(
            tiers, lambda terms: ArenaPool(device, BUDGET_BYTES, terms), snapshots=unkept
        ) as gateway,
    ):
        assert gateway.ping().fallbacks["snapshots_without_graphs"] == 1
    assert "snapshots_without_graphs" in FALLBACKS
    start.config = EngineConfig(graphs="off")
    assert not start.snapshots().lacks_graphs
