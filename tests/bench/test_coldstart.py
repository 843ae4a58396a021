"""The cold start bench: what it reads from a service's log, how it judges, and that a failure costs no other.

Its parts ask services and new processes, which takes too long here: `python -m bench.coldstart --tiny` runs
all of them on a CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.coldstart import __main__ as coldstart
from bench.coldstart import graph_process
from bench.coldstart.__main__ import Question
from bench.coldstart.graph_process import Captured, Decoded, GraphTask, Restored
from bench.coldstart.graphs import Compared
from bench.coldstart.part import Part, figures_of_peers
from bench.coldstart.setting import TINY_SCALE, Setting
from bench.coldstart.shapes import TINY_SHAPES
from bench.coldstart.snapshot_use import SnapshotUse
from bench.coldstart.start_log import Restoring
from bench.report import Row
from bench.service.client import Answer, Event, Reply

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


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "service.log"
    path.write_text(LOG)
    return path


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
