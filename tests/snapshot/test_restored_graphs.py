"""The graphs of a snapshot: packed, restored one by one, and given up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hearth.core.errors import GraphUnreadable
from hearth.snapshot import restored_graphs
from hearth.snapshot.file import open_snapshot, write_snapshot
from hearth.snapshot.graph_names import is_for_adapters
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import MEMORYTYPE_DEVICE, MEMORYTYPE_HOST
from hearth.system.cuda.graphs import KERNEL_NODE
from tests.snapshot.fake_driver import FakeDriver
from tests.snapshot.fake_library import FakeLibrary, rebuild_over
from tests.snapshot.fingerprints import FINGERPRINT, KEY

FIXED = range(0x18000000000, 0x20000000000)


class Driver(FakeDriver):
    """One to which all addresses below 0x7f0000000000 are the device's, and all others the host's."""

    def memory_at(self, value: int) -> int | None:
        return MEMORYTYPE_HOST if value >= 0x7F0000000000 else MEMORYTYPE_DEVICE


class Machine:
    """A process: a driver, whose library has a kernel for each size, in a module of its own."""

    def __init__(self, sizes: list[int]) -> None:
        self.driver = Driver()
        self.library = FakeLibrary(self.driver)
        self.rebuild = rebuild_over(self.library)
        self.function_by_size = {
            size: self.driver.add_function(f"product_{size}", size, [(0, 8)]) for size in sizes
        }
        self.handles = KernelHandles(self.driver, dict)
        self.rehearsed: list[str] = []
        self.reasons: list[str] = []

    def capture(self, size: int, points_at: int = FIXED.start) -> int:
        """A graph of one product, that computes at an address."""
        graph, params = self.driver.create(), np.zeros(1, KERNEL_NODE)
        address = np.array([points_at], np.uint64)
        pointers = np.array([address.ctypes.data], np.uint64)
        params["function"], params["parameters"] = self.function_by_size[size], pointers.ctypes.data
        self.driver.add_kernels(graph, params)
        return graph

    def rehearse(self, name: str) -> None:
        self.rehearsed.append(name)
        size = int(name.rpartition("-")[2])
        if size in self.function_by_size:
            self.handles.learn(self.capture(size))

    def restored(self, sections: dict[str, bytes]) -> RestoredGraphs:
        views = {name: memoryview(packed) for name, packed in sections.items()}
        mark = TrialMark(Path("nowhere.snapshot"))  # of which nothing is tried
        return RestoredGraphs(self.handles, views, mark, self.reasons.append)


def views_of(names: list[str]) -> dict[str, memoryview]:
    return {name: memoryview(packed) for name, packed in sections_of(names).items()}


def sections_of(names: list[str]) -> dict[str, bytes]:
    """What a process has written that captured graphs of these names."""
    sizes = [int(name.rpartition("-")[2]) for name in names]
    machine = Machine(sizes)
    graphs = {name: machine.capture(size) for name, size in zip(names, sizes, strict=True)}
    return pack_graphs(machine.driver, graphs, {}, FIXED)


def test_all_graphs_are_restored_the_smallest_first() -> None:
    names = ["decode-64", "mixed-512", "decode-8", "tail-1"]
    machine = Machine([1, 8, 64, 512])
    graphs = machine.restored(sections_of(names) | {"memory_profile": b"other"})
    assert all(graphs.is_coming(name) for name in names)
    assert graphs.find("decode-8") is None
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)

    assert machine.rehearsed == ["tail-1", "decode-8", "decode-64", "mixed-512"]
    assert not any(graphs.is_coming(name) for name in names)
    found = graphs.find("decode-8")
    assert found is not None
    found.launch(3)
    assert len(machine.driver.launched) == 1
    assert graphs.find("decode-16") is None


def test_the_pause_that_is_told_of_is_that_before_the_first_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind it graphs come one by one, also while steps are given way to: that is when others may notice."""
    caplog.set_level("INFO")
    names, now_s = ["decode-1", "decode-8", "decode-64"], [0.0]
    machine = Machine([1, 8, 64])
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    def give_way() -> None:
        now_s[0] += 5.0 if now_s[0] == 0.0 else 0.5

    machine.restored(sections_of(names)).restore(machine.rebuild, machine.rehearse, give_way)
    assert "graphs=3 of=3 seconds=6.000 paused_s=5.000" in caplog.text


def test_a_graph_that_a_step_needs_is_restored_before_smaller_ones() -> None:
    names = ["decode-1", "decode-8", "decode-64", "mixed-512"]
    machine = Machine([1, 8, 64, 512])
    graphs = machine.restored(sections_of(names))
    pauses = iter([["decode-64"], ["decode-64", "mixed-512", "tail-3"]])  # what steps need meanwhile

    def pause() -> None:
        for name in next(pauses, []):
            graphs.want(name)

    graphs.restore(machine.rebuild, machine.rehearse, pause)
    assert machine.rehearsed == ["decode-64", "mixed-512", "decode-1", "decode-8"]
    assert all(graphs.find(name) for name in names)


def test_kernels_that_are_known_need_no_rehearsal() -> None:
    """Another model has used them; but the first graph of each kind is rehearsed in any case."""
    machine = Machine([8, 64])
    for size in (8, 64):
        machine.handles.learn(machine.capture(size))
    graphs = machine.restored(sections_of(["decode-8", "decode-64"]))
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)

    assert machine.rehearsed == ["decode-8"]
    assert graphs.find("decode-64") is not None


def test_without_native_code_no_graph_comes_and_each_counts_as_failed(tmp_path: Path) -> None:
    path, machine = tmp_path / "a.snapshot", Machine([8, 64])
    write_snapshot(path, FINGERPRINT, sections_of(["decode-8", "decode-64", "decode-adapters-8"]), KEY)
    num_files = len(os.listdir("/proc/self/fd"))
    graphs = later(machine, open_snapshot(path, KEY))
    graphs.restore(None, machine.rehearse, lambda: None)
    graphs.want_adapters()

    assert machine.rehearsed == []
    assert not any(graphs.is_coming(name) or graphs.find(name) for name in ("decode-8", "decode-adapters-8"))
    assert graphs.num_failed == 2
    assert len(os.listdir("/proc/self/fd")) <= num_files, "the file is closed"


def test_a_graph_that_the_driver_refuses_is_left_out_and_the_others_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine([8, 64])
    machine.library.refusals["cuGraphInstantiateWithFlags"] = (1, 719)
    graphs = machine.restored(sections_of(["decode-8", "decode-64"]))
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)

    assert graphs.find("decode-8") is not None
    assert (graphs.find("decode-64"), graphs.num_failed) == (None, 1)
    assert "decode-64: CUDA's driver refused cuGraphInstantiateWithFlags" in caplog.text


def test_each_graph_gives_way_and_none_is_restored_that_nobody_wants_any_more() -> None:
    machine = Machine([8, 64])
    graphs, num_pauses = machine.restored(sections_of(["decode-8", "decode-64"])), list[None]()

    def pause() -> None:
        num_pauses.append(None)
        if len(num_pauses) == 2:
            graphs.stop()

    graphs.restore(machine.rebuild, machine.rehearse, pause)

    assert (machine.rehearsed, len(num_pauses)) == (["decode-8"], 2)
    assert graphs.find("decode-8") is not None


def test_a_graph_whose_kernels_are_nowhere_is_left_out_visibly(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine([8])
    graphs = machine.restored(sections_of(["decode-8", "decode-64"]))
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)

    assert graphs.find("decode-8") is not None
    assert graphs.find("decode-64") is None
    assert not graphs.is_coming("decode-64")
    assert graphs.num_failed == 1
    assert "fallback graphs=captured count=1 reason=`decode-64: 1 of 1 kernels" in caplog.text


def test_nothing_is_rehearsed_whose_triton_kernels_are_not_loaded() -> None:
    """They would be compiled beside the steps of all models, which keeps the interpreter from these."""
    captured, machine = Machine([8]), Machine([8])
    graphs = {"decode-8": captured.capture(8)}
    binaries = {captured.function_by_size[8]: "hash of source and variant"}
    restored = machine.restored(pack_graphs(captured.driver, graphs, binaries, FIXED))
    restored.restore(machine.rebuild, machine.rehearse, lambda: None)

    assert machine.rehearsed == []
    assert restored.num_failed == 1


def test_a_discarded_snapshot_has_no_graphs_and_none_are_coming() -> None:
    machine = Machine([8, 64])
    graphs = machine.restored(sections_of(["decode-8", "decode-64"]))

    def discard(name: str) -> None:
        machine.rehearse(name)
        if name == "decode-64":  # while this one is restored
            graphs.discard("3 numbers differ")

    graphs.restore(machine.rebuild, discard, lambda: None)

    assert machine.reasons == ["3 numbers differ"]
    assert graphs.find("decode-8") is None
    assert not graphs.is_coming("decode-64")


def test_a_graph_that_points_outside_of_fixed_addresses_is_not_packed() -> None:
    machine = Machine([8])
    with pytest.raises(GraphUnreadable, match="`decode-8` points at 0x7f0000001000"):
        pack_graphs(machine.driver, {"decode-8": machine.capture(8, 0x7F0000001000)}, {}, FIXED)


@pytest.mark.parametrize("points_at", [0x7E0000001000, 0x7F8E00000002])
def test_only_device_memory_counts_inside_of_a_larger_parameter(points_at: int) -> None:
    machine = Machine([8])
    function = machine.driver.add_function("library_product", 9, [(0, 16)])
    structure = np.array([FIXED.start, points_at], np.uint64)  # a pointer; a count and what lay beside it
    graph, params = machine.driver.create(), np.zeros(1, KERNEL_NODE)
    pointers = np.array([structure.ctypes.data], np.uint64)
    params["function"], params["parameters"] = function, pointers.ctypes.data
    machine.driver.add_kernels(graph, params)

    if points_at < 0x7F0000000000:
        with pytest.raises(GraphUnreadable, match="byte 8 of the parameters of library_product"):
            pack_graphs(machine.driver, {"decode-8": graph}, {}, FIXED)
    else:
        assert "graph/decode-8" in pack_graphs(machine.driver, {"decode-8": graph}, {}, FIXED)


def test_a_section_that_no_graph_has_is_refused() -> None:
    with pytest.raises(GraphUnreadable, match="`nothing` has no number of rows"):
        Machine([8]).restored({"graph/nothing": b""})


def test_a_damaged_graph_discards_the_snapshot() -> None:
    sections = sections_of(["decode-8", "decode-16", "decode-64"])
    sections["graph/decode-16"] = sections["graph/decode-16"][:-64]
    machine = Machine([8, 16, 64])
    graphs = machine.restored(sections)
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)

    (reason,) = machine.reasons
    assert "a packed graph has" in reason
    assert not any(graphs.find(name) for name in ("decode-8", "decode-16", "decode-64"))
    assert not graphs.is_coming("decode-64")


def test_a_rehearsal_waits_for_the_memory_of_weights_that_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_graphs, "MEMORY_LOOK_S", 0.0)
    machine, refusals = Machine([8]), [None, None]

    def rehearse(name: str) -> None:
        if refusals:
            refusals.pop()
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        machine.rehearse(name)

    graphs = machine.restored(sections_of(["decode-8"]))
    graphs.restore(machine.rebuild, rehearse, lambda: None)
    assert graphs.find("decode-8") is not None


def test_a_rehearsal_waits_for_no_memory_once_nobody_wants_the_graphs() -> None:
    machine = Machine([8])
    graphs = machine.restored(sections_of(["decode-8"]))

    def rehearse(name: str) -> None:
        graphs.stop()  # its engine is closed, and its memory gone
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    graphs.restore(machine.rebuild, rehearse, lambda: None)
    assert graphs.find("decode-8") is None


def later(machine: Machine, views: Mapping[str, memoryview]) -> RestoredGraphs:
    """Graphs of a snapshot, those for adapters only once they are wanted."""
    mark = TrialMark(Path("nowhere.snapshot"))
    return RestoredGraphs(
        machine.handles,
        views,
        mark,
        machine.reasons.append,
        is_for_adapters,
        go_on=lambda graphs: graphs.restore(machine.rebuild, machine.rehearse, lambda: None),
    )


def test_graphs_for_adapters_come_once_somebody_wants_them_the_smallest_first() -> None:
    names = ["decode-adapters-64", "decode-8", "mixed-adapters-512", "decode-64", "tail-adapters-1"]
    machine = Machine([1, 8, 64, 512])
    graphs = later(machine, views_of(names))
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)
    assert machine.rehearsed == ["decode-8", "decode-64"]
    assert not graphs.is_coming("decode-adapters-64")
    graphs.want_adapters()
    graphs.want_adapters()

    # The kernel of 64 rows was known, but its kind was not.
    assert machine.rehearsed[2:] == ["tail-adapters-1", "decode-adapters-64", "mixed-adapters-512"]
    assert all(graphs.find(name) for name in names)
    assert graphs.num_failed == 0


def test_graphs_that_are_wanted_while_others_come_are_restored_behind_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine([1, 8, 64])
    graphs = later(machine, views_of(["decode-8", "decode-64", "decode-adapters-1"]))
    graphs._go_on = lambda _: None  # which the thread does when it is done
    caplog.set_level("INFO")

    def rehearse(name: str) -> None:
        graphs.want_adapters()
        assert graphs.is_coming("decode-adapters-1")
        machine.rehearse(name)

    graphs.restore(machine.rebuild, rehearse, lambda: None)
    graphs.restore(machine.rebuild, rehearse, lambda: None)
    assert machine.rehearsed == ["decode-8", "decode-64", "decode-adapters-1"]
    assert [text.partition(" seconds")[0] for text in caplog.messages] == ["graphs_restored graphs=3 of=3"]


def test_a_file_is_closed_when_all_of_its_graphs_have_come(tmp_path: Path) -> None:
    """A worker has many models, and may not open many files."""
    path, machine = tmp_path / "a.snapshot", Machine([8, 64])
    write_snapshot(path, FINGERPRINT, sections_of(["decode-8", "decode-adapters-64"]), KEY)
    num_files, opened = len(os.listdir("/proc/self/fd")), open_snapshot(path, KEY)
    graphs = later(machine, opened)
    del opened
    graphs.restore(machine.rebuild, machine.rehearse, lambda: None)
    assert graphs.find("decode-8")
    assert len(os.listdir("/proc/self/fd")) == num_files + 1, "those for adapters may be wanted"
    graphs.want_adapters()
    assert graphs.find("decode-adapters-64")
    assert len(os.listdir("/proc/self/fd")) <= num_files


@pytest.mark.parametrize("end", ["stop", "discard"])
def test_nothing_comes_of_a_snapshot_that_nobody_wants_any_more(end: str) -> None:
    machine = Machine([8])
    graphs = later(machine, views_of(["decode-adapters-8"]))
    getattr(graphs, end)(*(["3 numbers differ"] if end == "discard" else []))
    graphs.want_adapters()

    assert graphs.find("decode-adapters-8") is None
    assert graphs.num_failed == 0, "it was not wanted"
