"""Where does the time of a model's start on a warm worker go, from the request to the first token?

    python -m bench.model_start [--save] [--models 0.5B 7B] [--only starts steps] [--tiny] [--place DIR]

    starts   each model from host memory, for the first time in the process of its worker: what
             `hearth explain` says of it, in ms, against bytes / bandwidth
    steps    the first steps of a process, with the model all there: as they are, and behind a rehearsal; and
             which calls of the very first one took long

Random models in bf16, as those of `bench.coldstart`. `--tiny` does the same with small ones on the CPU, to
see that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bench.coldstart.setting import PROMPT_TOKENS, TINY_SCALE, Scale, Setting
from bench.random_engine import new_engine
from bench.report import arguments, emit, tell
from bench.service.process import Service
from bench.shape import Shape
from hearth.core.config import EngineConfig
from hearth.core.types import RequestId, SamplingParams

_NUM_STEPS = 4
_NUM_CALLS = 24  #: of a profile that are told
#: Events of the log that are told.
_TOLD = (
    *("worker_started", "steps_rehearsed", "kernels_loaded", "model_load", "engine_assembled", "fallback"),
    *("model_not_prepared", "snapshot_used", "graphs_restored"),
)


def starts(setting: Setting, models: list[str]) -> Mapping[str, object]:
    """Start models on a worker that has prepared for them and has hosted none."""
    setting.need(*models)
    service = setting.service()
    for name in models:  # to host memory
        setting.ask(service, name)
    setting.replace_worker()
    results = {name: _start(setting, service, name) for name in models}
    log = setting.log.read_text(errors="replace").splitlines()
    return {**results, "log": [line for line in log[-60:] if any(word in line for word in _TOLD)]}


def _start(setting: Setting, service: Service, name: str) -> dict[str, object]:
    asked, bound_s = setting.ask(service, name), setting.model_bytes(name) / setting.bytes_per_s
    first_s, ratio = asked.answer.first_s, asked.answer.first_s / bound_s
    tell(f"{name}: first token after {1e3 * first_s:.1f} ms, bound {1e3 * bound_s:.1f}, ratio {ratio:.3f}")
    spans = {
        span.what: f"{1e3 * span.begin_s:.1f} to {1e3 * span.end_s:.1f} ms {span.detail}"
        for span in asked.explained.spans
    }
    for what, line in spans.items():
        tell(f"    {what:10} {line}")
    return {"first_s": first_s, "bound_s": bound_s, "ratio": ratio, "spans": spans}


def steps(setting: Setting, models: list[str]) -> Mapping[str, object]:
    """Time first steps in processes of their own."""
    results = dict[str, object]()
    for is_rehearsed in (False, True):
        command = [sys.executable, "-m", "bench.model_start", "--first-step", models[0], setting.scale.kind]
        command += ["--rehearsed"] * is_rehearsed
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        tell(done.stderr[-9000:])
        what = "rehearsed" if is_rehearsed else "as it is"
        results[what] = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-2000:]
    return results


def first_step(name: str, kind: str, *, is_rehearsed: bool) -> Mapping[str, object]:
    """Make the first steps of this process; returns how long each took, in ms."""
    scale, device = Scale() if kind == "cuda" else TINY_SCALE, torch.device(kind)
    shape = scale.shapes[name]
    max_tokens = 8192 if kind == "cuda" else 256
    config = EngineConfig(graphs="off", kv_bytes=1 << 30, max_batch_tokens=max_tokens, max_seqs=256)
    if is_rehearsed and kind == "cuda":
        _rehearse(shape, config, device)
    engine = new_engine(shape, config, device, seed=None, max_context=1024)
    greedy = SamplingParams(temperature=0.0, max_tokens=_NUM_STEPS, ignore_eos=True)
    times_ms, profile = list[float](), cProfile.Profile()
    engine.add(engine.request(RequestId("first"), list(range(1, PROMPT_TOKENS + 1)), greedy))
    while engine.has_work:
        began_s = time.perf_counter()
        if times_ms:
            engine.step()
        else:
            profile.runcall(engine.step)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    tell(f"{name} {'rehearsed' if is_rehearsed else 'as it is'}: steps of {times_ms} ms")
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(_NUM_CALLS)
    return {"steps_ms": times_ms}


def _rehearse(shape: Shape, config: EngineConfig, device: torch.device) -> None:
    from bench.random_engine import make_kernels_ready
    from hearth.engine.assemble import own_limits
    from hearth.engine.dry_run import KernelNeeds
    from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
    from hearth.models.dtypes import DTYPES
    from hearth.worker.step_rehearsal import first_step_keys, rehearse

    limits = own_limits(config, shape.arch, DTYPES[shape.dtype], device)
    needs = KernelNeeds.on(device, shape.arch, shape.dtype, shape.quant, limits)
    profile = cProfile.Profile()
    profile.runcall(make_kernels_ready, needs)  # compiled by the process before: what the first list costs
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(_NUM_CALLS)
    for what in ("first", "again"):
        began_s = time.perf_counter()
        pages = CudaPages(device, PAGE_BYTES)
        rehearse(needs, pages, device, lambda: None, lambda _: None, first_step_keys)
        tell(f"rehearsal, {what}: {1e3 * (time.perf_counter() - began_s):.1f} ms")


PARTS: dict[str, Callable[[Setting, list[str]], Mapping[str, object]]] = {"starts": starts, "steps": steps}


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", default=["0.5B", "7B"])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    parser.add_argument("--first-step", nargs=2, metavar=("MODEL", "KIND"), help="what a child process does")
    parser.add_argument("--rehearsed", action="store_true", help="likewise")
    options = parser.parse_args()
    if options.first_step is not None:
        print(json.dumps(first_step(*options.first_step, is_rehearsed=options.rehearsed)))
        return
    place, results = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=options.place)), dict[str, object]()
    setting = Setting(TINY_SCALE if options.tiny else Scale(host_bytes=20 * 10**9), place)
    try:
        for part in options.only:
            try:
                results[part] = PARTS[part](setting, options.models)
            except Exception as error:  # the other part may tell something
                traceback.print_exc()
                results[part] = repr(error)
    finally:
        setting.stop()
        shutil.rmtree(place, ignore_errors=True)
    emit("model_start", {"is_tiny": options.tiny, "results": results}, save=options.save)


if __name__ == "__main__":
    main()
