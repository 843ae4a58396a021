"""The part `graphs`: capturing all graphs of a model, against restoring them in a new process.

For each shape one process captures them and makes a snapshot (`graph_process.py`), and another one uses it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TypedDict

from bench.coldstart.graph_process import GraphTask
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


class _Decoded(TypedDict):
    tokens_per_s: float
    digest: str


def graphs(setting: Setting, names: Sequence[str]) -> Part:
    """Capture and restore the graphs of models, each in processes of its own."""
    setting.stop()  # whose worker has the memory
    setting.compile_kernels(names)
    rows, details, problems = list[Row](), dict[str, object](), list[str]()
    for name in names:
        try:
            with step(f"graphs of {name}"):
                captured = _run(setting, name, does_capture=True)
                restored = _run(setting, name, does_capture=False)
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # the next model may do better
            problems.append(f"{name}: {error}")
            continue
        found, problem = _compared(captured, restored)
        details[name] = {**found, "captured": captured, "restored": restored}
        tell(f"graphs of {name}: {json.dumps(found)}")
        problems += [] if problem is None else [f"{name}: {problem}"]
        rows += _rows(name, captured, restored) if setting.has_graphs else []
    return Part(rows, {**details, "compile_s": setting.compile_s}, "; ".join(problems) or None)


def _run(setting: Setting, name: str, *, does_capture: bool) -> dict[str, object]:
    shape, scale = setting.scale.shapes[name], setting.scale
    task = GraphTask(
        does_capture,
        *(shape.config, shape.dtype, scale.kind, asdict(setting.limits(name))),
        kernels=str(DataDir(setting.data_dir).kernels_path),
        snapshots=str(setting.place / "graphs" / name),
        num_requests=scale.decode_requests,
        num_tokens=scale.decode_tokens,
    )
    done = subprocess.run(
        [sys.executable, "-m", "bench.coldstart.graph_process", json.dumps(asdict(task))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    if done.returncode:
        what = "captures" if does_capture else "restores"
        raise RuntimeError(f"the process that {what} graphs of {name} ended with {done.returncode}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _compared(
    captured: Mapping[str, object], restored: Mapping[str, object]
) -> tuple[dict[str, object], str | None]:
    """Return what matters of two processes, and what is wrong with it."""
    rates, digests = zip(*(_last_decoded(one) for one in (captured, restored)), strict=True)
    figures = {
        "num_graphs": captured["num_graphs"],
        "num_nodes": captured["num_nodes"],
        "file_bytes": captured["file_bytes"],
        "first_capture_s": captured["first_capture_s"],
        "capture_s": captured["capture_s"],
        "first_restore_s": restored["first_restore_s"],
        "restore_s": restored["restore_s"],
        "on_the_way_s": restored["first_look_s"],
        "kv_s": restored["kv_s"],
        "decode_ratio": rates[1] / rates[0],
        "is_equal": digests[0] == digests[1],
    }
    if not figures["is_equal"]:
        return figures, "the tokens on restored graphs are others than on captured ones"
    if restored["num_captured"] or (captured["num_graphs"] and not restored["num_tried"]):
        return figures, f"{restored['num_tried']} restored graphs serve, {restored['num_captured']} captured"
    return figures, None


def _last_decoded(found: Mapping[str, object]) -> tuple[float, str]:
    decoded = found["decoded"]
    assert isinstance(decoded, list)
    last: _Decoded = decoded[-1]
    return last["tokens_per_s"], last["digest"]


def _rows(name: str, captured: Mapping[str, object], restored: Mapping[str, object]) -> list[Row]:
    def of(found: Mapping[str, object], field: str) -> float:
        value = found[field]
        assert isinstance(value, float), f"{field}={value}"
        return value

    (captured_rate, _), (restored_rate, _) = _last_decoded(captured), _last_decoded(restored)
    what, aim = f"{name}: all {captured['num_graphs']} graphs", f"at most 1/{AIM_RESTORE:g} of capturing them"
    peers = {key: figures_of_peers(f"{name} {key}") for key in ("capture", "restore", "KV")}
    return [
        Row(f"{what}, captured", "s", of(captured, "capture_s"), None, None, peers["capture"], False),
        Row(f"{what}, captured, new process", "s", of(captured, "first_capture_s")),
        Row(f"{what}, restored", "s", of(restored, "restore_s"), None, aim, peers["restore"], False),
        Row(f"{what}, restored, new process", "s", of(restored, "first_restore_s"), None, aim),
        Row(
            f"{name}: graphs on the way to the first token",
            *("ms", 1e3 * of(restored, "first_look_s"), None, f"under {AIM_LOOK_MS:g} ms"),
        ),
        Row(
            f"{name}: KV of a first request",
            *("ms", 1e3 * of(restored, "kv_s"), None, f"under {AIM_KV_MS:g} ms", peers["KV"], False),
        ),
        Row(
            f"{name}: decoding on restored graphs",
            *("tokens/s", restored_rate, captured_rate, f"at least {AIM_DECODE:g} of the bound"),
        ),
    ]
