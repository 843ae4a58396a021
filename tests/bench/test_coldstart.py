"""The cold start bench: what it reads from a service's log, how it judges, and that a failure costs no other.

Its parts ask services and new processes, which takes too long here: `python -m bench.coldstart --tiny` runs
all of them on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.coldstart import __main__ as coldstart
from bench.coldstart import graph_process
from bench.coldstart.__main__ import Question
from bench.coldstart.arrivals import arrivals, first_steps
from bench.coldstart.beside import _compared, _Round, _Seen, by_phase
from bench.coldstart.graph_process import Captured, Decoded, GraphTask, Restored
from bench.coldstart.graphs import Compared
from bench.coldstart.part import Part, figures_of_peers
from bench.coldstart.registering import Registered, Waits, pinning
from bench.coldstart.setting import TINY_SCALE, USUAL, Setting, _Running
from bench.coldstart.shapes import TINY_SHAPES
from bench.coldstart.snapshot_use import SnapshotUse
from bench.coldstart.start_log import LogTail, Restoring, breakdown, restorings
from bench.load.raw_readers import pinned, to_device_bytes_per_s
from bench.report import Row
from bench.service.client import Answer, Event, Reply
from bench.service.gaps import Gap, Window, load_again_and_again
from hearth.store.tiers.segment import Segment
from tests.store.transfer.noted_driver import note_pins

LOG = """\
2026-11-16 11:43:00,000 INFO hearth.node.worker_template template_ready pid=1
2026-11-16 11:43:35,361 INFO hearth.cli.serve settings log.level by --set
2026-11-16 11:43:37,066 INFO hearth.cli.server serving listening=127.0.0.1:1 url=http://127.0.0.1:1
Traceback of somebody
2026-11-16 11:43:39,632 INFO hearth.node.worker_template template_ready pid=2
2026-11-16 11:43:39,656 INFO hearth.node.worker_template worker_forked worker=w0 pid=3
2026-11-16 11:43:40,084 INFO hearth.node.supervisor worker_ready worker=w0 pid=3 device=GPU
2026-11-16 11:43:40,086 INFO w0 hearth.worker worker_started total_s=0.418 context_s=0.300 pages_s=0.100
2026-11-16 11:43:41,500 INFO w0 hearth.snapshot graphs_restored graphs=50 of=51 seconds=0.420 paused_s=0.150
2026-11-16 11:43:50,000 INFO w0.1 hearth.worker worker_started total_s=9.000
"""
BEGAN_S = datetime(2026, 11, 16, 11, 43, 35).timestamp()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "service.log"
    path.write_text(LOG)
    return path


def test_a_start_is_told_by_its_parts_and_not_by_those_of_another(log: Path) -> None:
    assert breakdown(log, BEGAN_S) == pytest.approx(
        {
            "serving": 2.066,
            "template": 4.632,
            "forked": 4.656,
            "worker_ready": 5.084,
            "worker_total": 0.418,
            "worker_context": 0.3,
            "worker_pages": 0.1,
        }
    )


def test_graphs_that_were_restored_are_found_in_the_log_with_when_that_was(log: Path) -> None:
    assert restorings(log, BEGAN_S) == [Restoring(pytest.approx(BEGAN_S + 6.5), 0.42, 50, 51, 0.15)]
    assert restorings(log, BEGAN_S + 7) == []


def test_what_is_added_to_a_log_is_read_once_and_not_before_its_line_has_ended(log: Path) -> None:
    tail = LogTail(log)
    assert tail.new_events() == []
    line = "2026-11-16 11:44:00,000 INFO w0 hearth.snapshot graphs_restored graphs=2 of=2 seconds=0.1"
    with log.open("a") as added:
        added.write(line + " rehearsed=3 rehea")
        added.flush()
        assert tail.new_events() == []
        added.write("rsal_s=0.05\nno event\n")
    (event,) = tail.new_events()
    assert Restoring.of(event) == Restoring(pytest.approx(BEGAN_S + 25), 0.1, 2, 2, 0.0, 3, 0.05)
    assert tail.new_events() == []


class FakeService:
    """A service that unloads, and says where the bytes of its answers came from: those of a model in turn."""

    def __init__(self, rungs: dict[str, list[list[str]]]) -> None:
        self.client, self.port, self.rungs, self.done = self, 0, rungs, list[str]()

    def unload(self, model: str, free: bool) -> None:
        assert free
        self.done.append(f"unload {model}")

    def ask(self, setting: Setting, service: object, model: str) -> Any:
        self.done.append(f"ask {model}")
        rungs = [SimpleNamespace(rung=rung) for rung in self.rungs[model].pop(0)]
        return SimpleNamespace(explained=SimpleNamespace(rungs=rungs))


def test_models_are_loaded_until_all_of_them_come_from_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that lies on the device is dropped before: to ask it would bring nothing to host memory."""
    rungs = {"7B": [["disk"], ["disk", "host"], ["host"]], "4B": [["host"], ["host"], ["host"]]}
    service, setting = FakeService(rungs), Setting(replace(TINY_SCALE, kind="cuda"), tmp_path)
    monkeypatch.setattr(Setting, "ask", lambda *given: service.ask(*given))
    assert setting.bring_to_host(service, "7B", "4B") == 6  # type: ignore[arg-type] # as far as it is asked
    assert service.done == ["unload 7B", "ask 7B", "unload 4B", "ask 4B"] * 3
    service.rungs = {"7B": [["disk", "host"]] * 9}
    with pytest.raises(RuntimeError, match=r"do not stay in host memory together.*disk"):
        setting.bring_to_host(service, "7B")  # type: ignore[arg-type]


def test_a_worker_rests_until_it_has_loaded_the_kernels_of_all_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = Setting(replace(TINY_SCALE, kind="cuda"), tmp_path)
    setting.log.parent.mkdir(parents=True)
    setting.log.touch()
    setting.made, setting._running = {"7B": {}, "4B": {}}, _Running(None, USUAL)  # type: ignore[arg-type] # none is asked
    num_looks = 0

    def sleep(seconds: float) -> None:
        nonlocal num_looks
        num_looks += seconds > 0
        with setting.log.open("a") as log:
            log.write("2026-11-16 11:44:00,000 INFO w0 hearth.worker steps_rehearsed sizes=40 seconds=0.3\n")

    monkeypatch.setattr("bench.coldstart.setting.time.sleep", sleep)
    setting.rest()
    setting.rest()
    assert num_looks == 3  # the first one came while host memory was pinned


def test_nothing_is_asked_besides_while_streams_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their tokens are read late, and the gaps are this process's own."""

    async def measure() -> list[Window]:
        is_over, num_asked = asyncio.Event(), 0

        async def run() -> list[Gap]:
            await is_over.wait()
            return []

        running = asyncio.create_task(run())

        async def ask(port: int, question: bytes) -> Reply:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 4:
                is_over.set()
                await running
            return Reply(float(num_asked))

        def explain(request_id: str) -> Any:
            assert running.done()
            load = SimpleNamespace(what="load", begin_s=0.25, end_s=0.5)
            return SimpleNamespace(spans=[SimpleNamespace(what="queue"), load])

        monkeypatch.setattr("bench.service.gaps.ask", ask)
        service: Any = SimpleNamespace(port=0, client=SimpleNamespace(explain=explain))
        return await load_again_and_again(service, "4B", running)

    events = [Event(9.0, " w1", None)]
    monkeypatch.setattr("bench.service.gaps.good", lambda reply: Answer(reply, events, 1, None, "length"))
    with asyncio.Runner() as runner:
        assert runner.run(measure()) == [Window(2.25, 2.5), Window(4.25, 4.5)]


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (SnapshotUse(1, True, {"used": 1, "made": 1}, [Restoring(0.0, 0.1, 51, 51)]), None),
        (SnapshotUse(1, True, {"used": 0, "missing": 1}, []), "should have been used 1 times"),
        (SnapshotUse(1, True, {"used": 1, "discarded": 1}, [Restoring(0.0, 0.1, 51, 51)]), "discarded"),
        (SnapshotUse(1, True, {"used": 1}, []), "should have been restored 1 times"),
        (
            SnapshotUse(1, True, {"used": 1}, [Restoring(0.0, 0.1, 50, 51)]),
            "should have been restored 1 times",
        ),
    ],
)
def test_a_start_without_its_snapshot_or_without_all_graphs_is_a_problem(
    use: SnapshotUse, problem: str | None
) -> None:
    assert use.problem is problem if problem is None else problem in (use.problem or "")


def answer(*at_s: float, asked_s: float = 0.0) -> Answer:
    events = [Event(at, " w1", None) for at in at_s]
    return Answer(Reply(asked_s), events, len(at_s), None, "length")


def test_steps_count_from_when_all_streams_run() -> None:
    early, late = answer(1.0, 3.0, 3.1, 3.2, 3.6), answer(3.0, 3.1, 3.2, 3.6, asked_s=0.5)
    steps = first_steps([early, late])
    assert steps.longest_over_median == pytest.approx(4.0)  # not the 2 s beside the other's prompt
    assert steps.longest_at_s == pytest.approx(3.2)
    assert steps.longest_but_last_over_median == pytest.approx(1.0)
    assert (steps.all_run_s, steps.total_s) == (3.0, pytest.approx(3.6))
    assert (steps.first_s["min"], steps.first_s["max"]) == (1.0, 2.5)


def test_gaps_are_told_apart_by_all_that_happened_meanwhile() -> None:
    """So that one which is long because a model is dropped is not taken for one of its graphs."""
    phases = {"drop": [Window(0.0, 1.0), Window(5.0, 6.0)], "graphs": [Window(0.9, 3.0)], "load": []}
    found = by_phase([Gap(0.1, 0.2), Gap(0.8, 1.4), Gap(2.0, 2.3), Gap(5.1, 5.5), Gap(7.0, 7.1)], phases)
    assert {name: (round(gaps["max"], 3), gaps["n"]) for name, gaps in found.items()} == {
        "drop": (0.4, 2),
        "drop, graphs": (0.6, 1),
        "graphs": (0.3, 1),
        "none": (0.1, 1),
    }


def test_beside_a_model_that_stays_the_gaps_of_the_same_moments_count() -> None:
    """The tokens of that model are then as large a share of the gaps as while it is restored."""
    gaps = [Gap(0.0, 0.2), Gap(0.4, 0.5), Gap(0.9, 1.0)]
    seen = _Seen(alone=[Gap(7.0, 7.1)], beside=gaps)
    seen.rounds = [_Round(Window(0.0, 1.0), resident_s=10.0), _Round(Window(2.0, 3.0), resident_s=20.0)]
    seen.resident = [Gap(10 + gap.begin_s, 10 + gap.end_s) for gap in gaps] + [Gap(20.3, 20.5)]
    arms = seen.arms([Window(0.45, 0.6)])
    assert arms == {"alone": [Gap(7.0, 7.1)], "restored": [Gap(0.4, 0.5)], "resident": [Gap(10.4, 10.5)]}
    compared = _compared({**arms, "resident": [Gap(0.0, 0.05)]})
    assert compared["restored_over_alone"] == pytest.approx({"p50": 1, "p90": 1, "p99": 1, "max": 1})
    assert compared["restored_over_resident"] == pytest.approx({"p50": 2, "p90": 2, "p99": 2, "max": 2})
    over = _compared({**arms, "restored": [Gap(0.0, 0.12), Gap(0.2, 0.3)]})
    assert over["share_over_aim"] == {"alone": 0.0, "restored": 0.5, "resident": 0.0}
    assert (over["meets_aim"], compared["meets_aim"]) == (False, True)


def test_requests_come_at_random_the_same_in_every_run() -> None:
    coming = arrivals(10.0, 20.0)
    assert coming == arrivals(10.0, 20.0)
    assert coming[0].due_s == 0.0
    assert coming[-1].due_s < 20.0
    assert 150 < len(coming) < 250


@pytest.mark.parametrize(("longest_ms", "pinned_bytes"), [(12.0, 1 << 20), (80.0, 1 << 20), (1.0, 0)])
def test_the_longest_wait_beside_registering_counts_if_all_was_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, longest_ms: float, pinned_bytes: int
) -> None:
    alone, beside = Waits({"map": 0.5, "copy": 0.2}, 9, 0.5), Waits({"map": longest_ms, "copy": 0.2}, 9, 0.5)
    found = json.dumps(asdict(Registered(1 << 20, pinned_bytes, alone, beside))).encode()
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 0, b"x\n" + found)
    )
    part = pinning(Setting(replace(TINY_SCALE, kind="cuda"), tmp_path))
    assert [(row.value, row.bound) for row in part.rows] == [(longest_ms, 0.5)]
    assert part.details["meets_aim"] is (longest_ms <= 50.0)
    assert (part.error is None) is (pinned_bytes == 1 << 20)


def test_memory_is_unregistered_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes while it is registered is taken for mapped by whoever gets its addresses next."""
    driver = note_pins(monkeypatch, 1 << 20)
    with pinned(1 << 20) as segment:
        assert driver.registered == {segment.address: 1 << 20}
    assert driver.registered == {}


def test_the_rate_to_a_device_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = note_pins(monkeypatch, 1 << 20)
    segments: list[Segment] = []
    monkeypatch.setattr(Segment, "close", _noting(segments, Segment.close))
    assert to_device_bytes_per_s(1 << 20, torch.device("cpu")) > 0
    assert (len(driver.order), driver.registered, len(segments)) == (1, {}, 1)


def _noting(closed: list[Segment], close: Any) -> Any:
    def noted(segment: Segment) -> None:
        closed.append(segment)
        close(segment)

    return noted


class Fakes:
    """Parts that ask nobody."""

    @staticmethod
    def works(setting: Setting) -> Part:
        return Part([Row("7B: something", "s", 1.5, 1.0, "at most 2 s")], {"why": "it works"})

    @staticmethod
    def breaks(setting: Setting) -> Part:
        raise RuntimeError("the driver is gone")

    @staticmethod
    def doubts(setting: Setting) -> Part:
        return Part([Row("7B: something else", "s", 2.5)], {}, "no snapshot was used")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path, *flags: str
) -> tuple[int, dict[str, Any]]:
    """Run the command over fakes and return its exit status and what it has printed."""
    asked = {
        name: Question(getattr(Fakes, name), (), 1, "asks nobody") for name in ("breaks", "works", "doubts")
    }
    monkeypatch.setattr(coldstart, "questions", lambda models=None: asked)
    monkeypatch.setattr(coldstart, "result_path", lambda name: place / f"{name}.json")
    monkeypatch.setattr(
        coldstart, "keep", lambda name, result: (place / f"{name}.json").write_text(json.dumps(result))
    )
    monkeypatch.setattr(coldstart.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--tiny", "--place", str(place), *flags])
    status = 0
    try:
        coldstart.main()
    except SystemExit as end:
        status = int(end.code or 0)
    return status, json.loads(capsys.readouterr().out)


def test_a_part_that_fails_has_its_error_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, result = run(monkeypatch, capsys, tmp_path)
    assert status == 1
    errors = {name: answer["error"] for name, answer in result["results"].items()}
    assert errors == {
        "breaks": "RuntimeError: the driver is gone",
        "works": None,
        "doubts": "no snapshot was used",
    }
    assert [row["measure"] for row in result["rows"]] == ["7B: something", "7B: something else"]
    assert result["rows"][0]["aim"] == "at most 2 s"
    assert list(tmp_path.iterdir()) == []  # neither models nor a result


def test_a_saved_result_keeps_the_parts_of_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, capsys, tmp_path, "--save", "--only", "doubts")[0] == 1
    assert run(monkeypatch, capsys, tmp_path, "--save", "--only", "works")[0] == 0
    saved = json.loads((tmp_path / "coldstart.json").read_text())
    assert [row["value"] for row in saved["rows"]] == [1.5, 2.5]
    assert list(saved["results"]) == ["works", "doubts"]


def test_a_model_that_cannot_be_made_fails_only_the_parts_that_need_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = Setting(replace(TINY_SCALE, shapes={"7B": TINY_SHAPES["7B"]}), tmp_path)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.coldstart.setting.write_random", no_room)
    setting.make_ready(["7B"])
    assert list(setting.failures) == ["7B"]
    with pytest.raises(RuntimeError, match="7B could not be made ready: OSError"):
        setting.need("7B")
    setting.need()


def test_a_process_uses_the_snapshot_of_another_and_decodes_the_same(tmp_path: Path) -> None:
    """Both in this one, on a CPU, which captures nothing: the rest is as in a worker's process."""
    shape, setting = TINY_SHAPES["7B"], Setting(TINY_SCALE, tmp_path)
    task = GraphTask(
        *(True, shape.config, shape.dtype, "cpu", asdict(setting.limits("7B"))),
        kernels="",
        snapshots=str(tmp_path / "snapshots"),
        num_requests=2,
        num_tokens=4,
    )
    captured, restored = graph_process.run(task), graph_process.run(replace(task, does_capture=False))
    assert isinstance(captured, Captured)
    assert isinstance(restored, Restored)
    assert captured.file_bytes > 0
    assert [one.digest for one in captured.decoded] == [one.digest for one in restored.decoded]
    assert captured.decoded[0].digest != captured.decoded[1].digest
    assert min(restored.first_look_s, restored.kv_s, restored.decoded[0].tokens_per_s) > 0


def test_figures_of_peers_have_a_row_and_a_source() -> None:
    assert figures_of_peers("7B start") == {"vLLM 0.25.1": 0.672, "FlashServe": 0.58}
    assert figures_of_peers("nothing") == {}


def test_tokens_on_restored_graphs_must_be_those_on_captured_ones() -> None:
    both = Compared(captured_graphs(digest="a"), restored_graphs(digest="a"))
    assert both.problem is None
    assert {row.measure: row.value for row in both.rows("4B")}["4B: all 51 graphs, restored"] == 0.13
    assert both.rows("4B")[0].peers == {"Medusa": 0.9}
    assert [row.bound for row in both.rows("4B") if ", restored" in row.measure] == [0.07, 0.07]
    assert "are others" in (replace(both, restored=restored_graphs(digest="b")).problem or "")
    both = replace(both, restored=replace(both.restored, num_captured=1))
    assert both.problem == "4 restored graphs serve, and 1 captured ones"


def captured_graphs(digest: str) -> Captured:
    return Captured(
        *({"context": 0.2}, 0.1, 0.1, 1.7, 1.1, 0.1, 0.07, 0.1, 0.1),
        file_bytes=12_000_000,
        num_graphs=51,
        num_nodes=15776,
        decoded=[Decoded(7000.0, digest)],
    )


def restored_graphs(digest: str) -> Restored:
    times_s = {"first_look_s": 0.004, "look_s": 0.002, "kv_s": 0.001, "all_kv_s": 0.1}
    return Restored(
        *({"context": 0.2}, 0.1, 0.1),
        **times_s,
        first_restore_s=0.42,
        restore_s=0.13,
        num_tried=4,
        num_captured=0,
        decoded=[Decoded(7000.0, digest)],
    )


def test_what_was_saved_before_keeps_when_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"environment": {"commit": "old"}, "is_tiny": False, "results": {"ready": {"rows": []}}}
    (tmp_path / "coldstart.json").write_text(json.dumps(saved))
    monkeypatch.setattr(coldstart, "result_path", lambda name: tmp_path / f"{name}.json")

    found = coldstart.merged({"burst": {"environment": {"commit": "new"}}}, ["ready", "burst"], is_tiny=False)

    commits = {name: answer["environment"] for name, answer in found.items()}
    assert commits == {"ready": {"commit": "old"}, "burst": {"commit": "new"}}
