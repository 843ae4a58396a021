"""Snapshots on a worker: made when nobody asks for anything, used by the next one, never in anybody's way."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from hearth.core.messages import MakeSnapshot, ModelLoaded, SnapshotLooked, SnapshotMade, SnapshotProgress
from hearth.core.types import ModelId, Rung, SnapshotOutcome
from hearth.engine.engine import Engine
from hearth.engine.graphs import StepGraphs
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.memory.arena import ArenaPool
from hearth.sim.profile import Profile
from hearth.snapshot.cost_profile import cost_profile_of
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.graph_names import graph_names, is_for_adapters
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.snapshot.parts import SnapshotParts
from hearth.snapshot.software import Software
from hearth.snapshot.trial_mark import TrialMark
from hearth.worker import model_snapshots, snapshot_maker
from hearth.worker.model_snapshots import ModelSnapshots, no_parts
from hearth.worker.snapshot_maker import process_bytes, resident_bytes
from hearth.worker.worker_loop import WorkerLoop
from tests.engine.test_graphs import Captures, Graph, Source
from tests.snapshot.test_trial_mark import die_in_a_trial_of
from tests.store.stored import PATIENCE_S, converted, gated_tiers, tiers_at
from tests.worker.harness import BUDGET_BYTES, CONFIG, greedy
from tests.worker.in_process import LoopGateway, working_in_process

pytestmark = pytest.mark.slow

PROMPT = (3, 14, 15, 92)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a second without requests, and no step is left out because a busy machine is slow."""
    monkeypatch.setattr(snapshot_maker, "QUIET_S", 0.0)
    monkeypatch.setattr(snapshot_maker, "LONGEST_S", math.inf)


@dataclass(slots=True)
class SnapshotWorker:
    """A worker with one model. Mutable, as the gateway is."""

    gateway: LoopGateway
    looked: SnapshotLooked

    def order(self, *, has_adapters: bool = False) -> None:
        self.gateway.inbox.put(MakeSnapshot(ModelId("a"), self.looked.hosting, has_adapters))

    def make(self, *, has_adapters: bool = False) -> SnapshotMade:
        self.order(has_adapters=has_adapters)
        return self.gateway.until(SnapshotMade)


@dataclass(slots=True)
class FakeParts:
    """State of an engine that is nothing but bytes. Mutable: notes what was restored."""

    restored: list[bytes] = field(default_factory=list)
    discard: Callable[[str], None] | None = None

    def save(self) -> dict[str, bytes]:
        return {"graphs": b"captured"}

    def lacks_adapters(self, sections: Collection[str]) -> bool:
        return False

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        self.restored.append(bytes(sections["graphs"]))
        self.discard = discard


@contextmanager
def worker(
    directory: SnapshotDirectory,
    place: Path,
    parts: SnapshotParts | None = None,
    parts_of: Callable[[Engine], SnapshotParts | None] | None = None,
    **changes: object,
) -> Iterator[SnapshotWorker]:
    """A worker that has loaded a model, `changes` being those of its order."""
    device = torch.device("cpu")
    snapshots = ModelSnapshots(
        directory, CONFIG, device, "a processor", 1 << 34, parts_of or (lambda engine: parts)
    )
    with (
        tiers_at(place) as tiers,
        working_in_process(
            tiers,
            lambda terms: ArenaPool(device, BUDGET_BYTES, terms),
            snapshots=snapshots,
        ) as gateway,
    ):
        gateway.host("a", converted("llama-gqa"), **changes)
        looked = gateway.until(SnapshotLooked)
        gateway.until(ModelLoaded)
        yield SnapshotWorker(gateway, looked)


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory.open(tmp_path / "snapshots", quota_bytes=1 << 20)


def test_a_snapshot_is_made_and_the_next_worker_uses_it(directory: SnapshotDirectory, tmp_path: Path) -> None:
    with worker(directory, tmp_path / "one") as first:
        assert first.looked.outcome is SnapshotOutcome.MISSING
        expected = first.gateway.ask("a", PROMPT, greedy(5)).tokens
        made = first.make()
        assert made.failure is None
        assert first.gateway.ask("a", PROMPT, greedy(5)).tokens == expected
    (entry,) = directory.entries()
    assert made.num_bytes == entry.num_bytes
    with worker(directory, tmp_path / "two") as second:
        assert (second.looked.outcome, second.looked.reason) == (SnapshotOutcome.USED, None)
        assert second.gateway.ask("a", PROMPT, greedy(5)).tokens == expected
    with worker(directory, tmp_path / "three", max_context=32) as third:
        assert third.looked.outcome is SnapshotOutcome.OUTDATED
        assert "`limits`" in str(third.looked.reason)
        assert third.make().failure is None
    assert len(directory.entries()) == 2
    for entry in directory.entries():
        os.truncate(entry.path, entry.num_bytes // 2)
    with worker(directory, tmp_path / "four") as fourth:
        assert fourth.looked.outcome is SnapshotOutcome.REFUSED
        assert fourth.gateway.ask("a", PROMPT, greedy(5)).tokens == expected
        assert fourth.make().failure is None
        assert fourth.gateway.ping().number == 0


def test_a_snapshot_has_what_was_measured(directory: SnapshotDirectory, tmp_path: Path) -> None:
    with worker(directory, tmp_path / "one") as one:
        one.gateway.ask("a", PROMPT * 10, greedy(6))
        made = one.make()
    (entry,) = directory.entries()
    with directory.open_file(entry.path) as opened:
        memory, cost = MemoryProfile.of(opened), cost_profile_of(opened)
    assert memory.resident_bytes == made.unbooked_bytes
    # An interpreter with torch takes at least this, and a pool that was counted would add far more.
    assert memory.resident_bytes > 50 << 20
    (shape,) = cost.shapes
    assert shape.name == "a"
    contexts = {step.context_tokens for step in shape.steps if step.num_rows == 1}
    assert max(contexts) > 40, "steps of the request are among them"
    assert cost.bytes_per_s[Rung.DISK] > 0
    assert f"bytes_per_s.{Rung.OBJECT}" in cost.origin.assumed
    profile = Profile.of(cost, "the snapshot")
    assert profile.shape("a").step_s(1, 1, 10) > 0.0
    assert profile.shape("7b").step_s(64, 2, 100) > profile.shape("a").step_s(64, 2, 100)


def test_progress_counts_the_steps_that_were_measured(directory: SnapshotDirectory, tmp_path: Path) -> None:
    told: list[SnapshotProgress] = []
    with worker(directory, tmp_path / "one") as one:
        one.order()
        while not isinstance(fact := one.gateway.hear(), SnapshotMade):
            if isinstance(fact, SnapshotProgress):
                told.append(fact)
    num_done = [fact.num_done for fact in told]
    assert num_done == sorted(num_done)
    assert num_done[0] == 0
    assert num_done[-1] == told[-1].num_steps > 0


def test_what_is_restored_and_wrong_is_discarded_for_everybody(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    parts = FakeParts()
    with worker(directory, tmp_path / "one", parts) as one:
        assert one.make().failure is None
    with worker(directory, tmp_path / "two", parts) as two:
        assert two.looked.outcome is SnapshotOutcome.USED
        assert parts.restored == [b"captured"]
        assert parts.discard is not None
        parts.discard("size 4 computes something else")
        assert directory.entries() == []
        fact = two.gateway.until(SnapshotLooked)
        assert (fact.outcome, fact.reason) == (SnapshotOutcome.DISCARDED, "size 4 computes something else")
        assert two.make().failure is None


class BrokenParts(FakeParts):
    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")


def test_a_model_starts_whatever_breaks_in_its_snapshot(directory: SnapshotDirectory, tmp_path: Path) -> None:
    with worker(directory, tmp_path / "one", parts := BrokenParts()) as one:
        assert one.make().failure is None
    with worker(directory, tmp_path / "two", parts) as two:
        assert two.looked.outcome is SnapshotOutcome.REFUSED
        assert "cannot schedule new futures" in str(two.looked.reason)
        assert len(two.gateway.ask("a", PROMPT, greedy(3)).tokens) == 3


def test_a_model_starts_where_nobody_can_tell_what_its_snapshot_depends_on(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def software(kind: str) -> Software:
        raise OSError("the files of Hearth cannot be read")

    monkeypatch.setattr(model_snapshots, "software", software)
    with worker(directory, tmp_path / "one") as one:
        assert one.looked.outcome is SnapshotOutcome.REFUSED
        assert "the files of Hearth cannot be read" in str(one.looked.reason)
        assert one.make().failure == one.looked.reason
        assert len(one.gateway.ask("a", PROMPT, greedy(3)).tokens) == 3
    assert directory.entries() == []


class GraphParts:
    """The graphs of an engine, of which a snapshot has names alone."""

    def __init__(self, engine: Engine) -> None:
        if engine.runner.layers.graphs is None:
            engine.runner.layers.graphs = StepGraphs(Captures())
        self._graphs = engine.runner.layers.graphs

    def save(self) -> dict[str, bytes]:
        return {f"graph/{key.name}": b"captured" for key in self._graphs.captured}

    def lacks_adapters(self, sections: Collection[str]) -> bool:
        return not any(map(is_for_adapters, graph_names(sections)))

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        names = [name.removeprefix("graph/") for name in sections if name.startswith("graph/")]
        self.source = Source({name: Graph() for name in names})
        self._graphs.restore_from(self.source)


def test_a_snapshot_made_of_restored_graphs_has_them_all(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    names = []
    for place in ("one", "two"):
        with worker(directory, tmp_path / place, parts_of=GraphParts) as one:
            for _ in range(2):  # before the first of the first worker, steps have no graphs
                assert one.make().failure is None
        (entry,) = directory.entries()
        with directory.open_file(entry.path) as opened:
            names.append({name for name in opened if name.startswith("graph/")})
    assert len(names[0]) > 3
    assert names[1] == names[0]


def test_a_processor_runs_no_step_that_is_larger_than_a_long_one(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_maker, "LONGEST_S", 0.0)
    with worker(directory, tmp_path / "one", parts_of=GraphParts) as one:
        for _ in range(2):  # before the first, steps have no graphs
            assert one.make().failure is None
    (entry,) = directory.entries()
    with directory.open_file(entry.path) as opened:
        assert set(graph_names(opened)) == {"decode-1", "mixed-2", "tail-1"}


class FewSizes(PaddedSizes):
    """Sizes of steps with adapters alone, for a CPU pads no steps."""

    def all_shapes(self, *, has_adapters: bool = False) -> list[StepShape]:
        sizes = (2, 1) if has_adapters else ()
        return [StepShape(False, size, size, has_adapters) for size in sizes]


class AdapterParts(GraphParts):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        engine.runner.layers.sizes = FewSizes()


def test_a_snapshot_has_graphs_of_steps_with_adapters_if_they_are_asked_for(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    for_adapters = {"graph/decode-adapters-1", "graph/decode-adapters-2"}
    with worker(directory, tmp_path / "one", parts_of=AdapterParts) as one:
        assert one.make().lacks_adapters  # before it, steps have no graphs
        assert one.make().lacks_adapters
        (entry,) = directory.entries()
        with directory.open_file(entry.path) as opened:
            bare, shapes = set(opened), cost_profile_of(opened).shapes
        assert not bare & for_adapters
    with worker(directory, tmp_path / "two", parts_of=AdapterParts) as two:
        assert (two.looked.outcome, two.looked.lacks_adapters) == (SnapshotOutcome.USED, True)
        made = two.make(has_adapters=True)
        assert (made.failure, made.lacks_adapters) == (None, False)
        (entry,) = directory.entries()
        with directory.open_file(entry.path) as opened:
            assert set(opened) == bare | for_adapters, "all that it had, and more"
            found = cost_profile_of(opened).shapes
        assert [len(one.steps) for one in found] == [len(one.steps) for one in shapes]
    with worker(directory, tmp_path / "three", parts_of=AdapterParts) as three:
        assert (three.looked.outcome, three.looked.lacks_adapters) == (SnapshotOutcome.USED, False)


def test_a_load_that_is_called_off_has_no_more_graphs_restored(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    restoring, may_go_on, parts = threading.Event(), threading.Event(), list[GraphParts]()

    class SlowParts(GraphParts):
        def restore(
            self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
        ) -> None:
            super().restore(sections, mark, discard)
            parts.append(self)
            restoring.set()
            assert may_go_on.wait(PATIENCE_S)

    with worker(directory, tmp_path / "one", parts_of=GraphParts) as one:
        assert one.make().failure is None
    device = torch.device("cpu")
    snapshots = ModelSnapshots(directory, CONFIG, device, "a processor", 1 << 34, SlowParts)
    with (
        tiers_at(tmp_path / "two") as tiers,
        working_in_process(
            tiers, lambda terms: ArenaPool(device, BUDGET_BYTES, terms), snapshots=snapshots
        ) as gateway,
    ):
        gateway.host("a", converted("llama-gqa"))
        assert restoring.wait(PATIENCE_S)
        gateway.drop("a")
        gateway.ping()
        may_go_on.set()
        give_up_s = time.monotonic() + PATIENCE_S
        while not parts[0].source.is_stopped:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)


def test_a_worker_that_keeps_graphs_takes_no_snapshot_without_them(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    """Where addresses differ from process to process none are kept, and it may be another process's turn."""
    with worker(directory, tmp_path / "one", parts_of=no_parts) as one:
        assert one.make().failure is None
    with worker(directory, tmp_path / "two", parts_of=GraphParts) as two:
        assert two.looked.outcome is SnapshotOutcome.OUTDATED
        assert "`engine` is graphs=on here and graphs=unkept there" in str(two.looked.reason)


def test_a_snapshot_that_a_worker_died_of_is_not_used_again(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    with worker(directory, tmp_path / "one") as one:
        assert one.make().failure is None
    (entry,) = directory.entries()
    die_in_a_trial_of(entry.path)
    with worker(directory, tmp_path / "two") as two:
        assert two.looked.outcome is SnapshotOutcome.DISCARDED
        assert "a worker died while it tried" in str(two.looked.reason)
        assert directory.entries() == []


def test_a_request_is_answered_in_between(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker(directory, tmp_path / "one") as one:
        one.order()
        one.gateway.until(SnapshotProgress)
        assert len(one.gateway.ask("a", PROMPT, greedy(5)).tokens) == 5
        assert one.gateway.until(SnapshotMade).failure is None


def test_no_step_is_run_until_nobody_has_asked_for_a_while(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_maker, "QUIET_S", 3600.0)
    with worker(directory, tmp_path / "one") as one:
        one.order()
        one.gateway.ask("a", PROMPT, greedy(2))
        one.gateway.ping()
        assert one.gateway.facts.empty()
        assert directory.entries() == []


def test_a_model_that_leaves_takes_its_snapshot_with_it(directory: SnapshotDirectory, tmp_path: Path) -> None:
    with worker(directory, tmp_path / "one") as one:
        one.order()
        one.gateway.until(SnapshotProgress)
        one.gateway.drop("a")
        one.gateway.ping()
        one.order()  # of a stay that is over
        one.gateway.ping()
        assert directory.entries() == []


def test_a_snapshot_that_cannot_be_written_harms_nobody(directory: SnapshotDirectory, tmp_path: Path) -> None:
    with worker(replace(directory, quota_bytes=100), tmp_path / "one") as one:
        assert "store.snapshot_bytes" in str(one.make().failure)
        assert len(one.gateway.ask("a", PROMPT, greedy(3)).tokens) == 3
    assert directory.entries() == []


def test_a_snapshot_of_a_process_whose_memory_nobody_can_tell_fails_with_the_reason(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel has no /proc/self/pagemap."""

    def resident_bytes(address: int, num_bytes: int) -> int:
        raise FileNotFoundError("/proc/self/pagemap")

    with worker(directory, tmp_path / "one") as one:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_maker, "resident_bytes", resident_bytes)
            assert one.make().failure == "/proc/self/pagemap"
        assert one.make().failure is None, "the next one is made"


def test_a_worker_sleeps_while_a_snapshot_has_to_wait(
    directory: SnapshotDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a request that waits for its model, no step can be made, neither of it nor of a snapshot."""
    looks: list[None] = []
    look = WorkerLoop._timeout_s

    def counted(loop: WorkerLoop) -> float | None:
        looks.append(None)
        return look(loop)

    device = torch.device("cpu")
    snapshots = ModelSnapshots(directory, CONFIG, device, "a processor", 1 << 34)
    with (
        gated_tiers(tmp_path) as gated,
        working_in_process(
            gated.tiers, lambda terms: ArenaPool(device, BUDGET_BYTES, terms), snapshots=snapshots
        ) as gateway,
    ):
        gateway.host("a", converted("llama-gqa"))
        run = gateway.start("a", PROMPT, greedy(2))
        looked = gateway.until(SnapshotLooked)
        gated.gate.next()  # held back
        gateway.inbox.put(MakeSnapshot(ModelId("a"), looked.hosting))
        gateway.ping()
        monkeypatch.setattr(WorkerLoop, "_timeout_s", counted)
        time.sleep(0.1)
        gateway.ping()
        assert len(looks) < 20
        gated.gate.open()
        gateway.until_ended(run)
        assert gateway.until(SnapshotMade).failure is None


PAGE = mmap.PAGESIZE


def test_only_pages_that_were_touched_are_resident() -> None:
    with mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
        address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
        assert resident_bytes(address, 64 * PAGE) == 0
        mapped[3 * PAGE] = mapped[9 * PAGE] = 1
        assert resident_bytes(address, 64 * PAGE) == 2 * PAGE
        assert resident_bytes(address + 3 * PAGE, PAGE) == PAGE
        assert resident_bytes(address + 4 * PAGE, 5 * PAGE) == 0
        del view


def test_what_a_process_takes_grows_by_what_it_touches() -> None:
    before = process_bytes(os.getpid())
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:
        mapped.write(bytes(64 << 20))
        assert process_bytes(os.getpid()) - before > 48 << 20
