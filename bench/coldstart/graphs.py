"""The part `graphs`: capturing all graphs of a model, against restoring them in a new process.

For each shape one process captures them and makes a snapshot (`graph_process.py`), and another one uses it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec

from bench.coldstart.graph_process import Captured, GraphTask, Restored
from bench.coldstart.part import Part, figures_of_peers
from bench.coldstart.setting import Setting
from bench.report import Row, step, tell
from bench.service.process import ROOT
from hearth.control.datadir import DataDir

AIM_RESTORE = 8.0  #: times faster than capturing
AIM_LOOK_MS, AIM_KV_MS = 5.0, 5.0
AIM_DECODE = 0.98  #: of the rate on captured graphs: what is less is no noise
#: A process takes some 10 s, and 17 more where kernels are not compiled.
_PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Compared:
    """A process that captured graphs, and one that restored them."""

    captured: Captured
    restored: Restored

    @property
    def figures(self) -> dict[str, object]:
        """What matters of both."""
        captured, restored = self.captured, self.restored
        return {
            "num_graphs": captured.num_graphs,
            "num_nodes": captured.num_nodes,
            "file_bytes": captured.file_bytes,
            "first_capture_s": captured.first_capture_s,
            "capture_s": captured.capture_s,
            "instantiate_s": captured.instantiate_s,
            "first_restore_s": restored.first_restore_s,
            "restore_s": restored.restore_s,
            "on_the_way_s": restored.first_look_s,
            "kv_s": restored.kv_s,
            "decode_ratio": restored.tokens_per_s / captured.tokens_per_s,
        }

    @property
    def problem(self) -> str | None:
        captured, restored = self.captured, self.restored
        if [one.digest for one in captured.decoded] != [one.digest for one in restored.decoded]:
            return "the tokens on restored graphs are others than on captured ones"
        if restored.num_captured or (captured.num_graphs and not restored.num_tried):
            return f"{restored.num_tried} restored graphs serve, and {restored.num_captured} captured ones"
        return None

    def rows(self, name: str) -> list[Row]:
        captured, restored = self.captured, self.restored
        what, aim = (
            f"{name}: all {captured.num_graphs} graphs",
            f"at most 1/{AIM_RESTORE:g} of capturing them",
        )
        peers = {measure: figures_of_peers(f"{name} {measure}") for measure in ("capture", "restore", "KV")}
        on_the_way = f"{name}: graphs on the way to the first token"
        return [
            Row(f"{what}, captured", "s", captured.capture_s, None, None, peers["capture"], False),
            Row(f"{what}, captured, new process", "s", captured.first_capture_s),
            # The driver makes them executable in any case: that is the bound, and among what capturing takes.
            Row(
                f"{what}, restored",
                *("s", restored.restore_s, captured.instantiate_s, aim, peers["restore"], False),
            ),
            Row(
                f"{what}, restored, new process",
                *("s", restored.first_restore_s, captured.instantiate_s, aim),
            ),
            Row(on_the_way, "ms", 1e3 * restored.first_look_s, None, f"under {AIM_LOOK_MS:g} ms"),
            Row(
                f"{name}: KV of a first request",
                *("ms", 1e3 * restored.kv_s, None, f"under {AIM_KV_MS:g} ms", peers["KV"], False),
            ),
            Row(
                f"{name}: decoding on restored graphs",
                *("tokens/s", restored.tokens_per_s, captured.tokens_per_s),
                aim=f"at least {AIM_DECODE:g} of the bound, on captured ones",
            ),
        ]


def graphs(setting: Setting, names: Sequence[str]) -> Part:
    """Capture and restore the graphs of models, each in processes of its own."""
    setting.stop()  # whose worker has the memory
    setting.compile_kernels(names)
    rows, details, problems = list[Row](), dict[str, object](), list[str]()
    for name in names:
        try:
            with step(f"graphs of {name}"):
                captured = msgspec.json.decode(_run(setting, name, does_capture=True), type=Captured)
                restored = msgspec.json.decode(_run(setting, name, does_capture=False), type=Restored)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # the next model may do better
            problems.append(f"{name}: {error}")
            continue
        both = Compared(captured, restored)
        details[name] = {**both.figures, "problem": both.problem, **asdict(both)}
        tell(f"graphs of {name}: {json.dumps(both.figures)}")
        problems += [] if both.problem is None else [f"{name}: {both.problem}"]
        rows += both.rows(name) if setting.has_graphs else []
    return Part(rows, {**details, "compile_s": setting.compile_s}, "; ".join(problems) or None)


def _run(setting: Setting, name: str, *, does_capture: bool) -> bytes:
    """Run a process and return what it prints last; raises RuntimeError if it fails."""
    shape, scale = setting.scale.shapes[name], setting.scale
    task = GraphTask(
        does_capture,
        *(shape.config, shape.dtype, scale.kind, asdict(setting.limits(name))),
        kernels=str(DataDir(setting.data_dir).kernels_path),
        snapshots=str(setting.place / "graphs" / name),
        num_requests=scale.decode_requests,
        num_tokens=scale.decode_tokens,
    )
    command = [sys.executable, "-m", "bench.coldstart.graph_process", json.dumps(asdict(task))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        what = "captures" if does_capture else "restores"
        raise RuntimeError(f"the process that {what} its graphs ended with {done.returncode}")
    return done.stdout.splitlines()[-1]
