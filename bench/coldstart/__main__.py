"""How long does everything take that happens before the first token? A service, a worker, a model.

python -m bench.coldstart [--save] [--only PART ...] [--models MODEL ...] [--host-bytes N] [--tiny]

{parts}

In brackets are the seconds on one H200. Besides, kernels of all models are compiled at once (20 s), models
are written (4 s for 13 GB), and a service makes their snapshots (10 s, and 12 s each): seven minutes in all.
Parts ask the 7B; first the 13B as well, others the 4B, graphs and model those of `--models`.

Random Llama-2-7B and 13B, Qwen-1.5-4B and 0.5B in bf16. Each part is told of as soon as it is over, and one
that fails costs no other; the exit status is 1 then. `--save` writes the result after every part, and keeps
those of an earlier run which are not asked for now. `--tiny` does the same with small models on the CPU, to
see that everything runs; its numbers mean nothing. The models need 49 GB in /dev/shm, the host tier takes
`--host-bytes` besides.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from bench.coldstart import arrivals, beside, parts
from bench.coldstart.graphs import graphs
from bench.coldstart.part import Part
from bench.coldstart.registering import pinning
from bench.coldstart.setting import TINY_SCALE, Scale, Setting
from bench.coldstart.shapes import SHAPES
from bench.report import arguments, emit, environment, keep, result_path, tell

#: Models whose graphs are captured if nobody says which: 13B is like 7B there.
_CAPTURED = ("7B", "4B", "0.5B")


@dataclass(frozen=True, slots=True)
class Question:
    """A part of the benchmark."""

    ask: Callable[[Setting], Part]
    models: Sequence[str]  #: that have to be ready
    seconds: int  #: that it takes on one H200
    text: str
    captured: Sequence[str] = ()  #: models of which it needs only kernels

    def line(self, name: str) -> str:
        return f"    {name:<8} {self.text} ({self.seconds} s)"


def questions(models: Sequence[str] | None = None) -> dict[str, Question]:
    """Return all parts, in an order in which a service serves several of them; two have these `models`."""
    captured, started = models or _CAPTURED, models or tuple(SHAPES)
    return {
        "graphs": Question(
            *(partial(graphs, names=captured), (), 20 * len(captured)),
            "all graphs of a model: captured, and restored in a new process; KV; decoding on them",
            captured,
        ),
        "pinning": Question(
            *(pinning, (), 10),
            "what waits on the device while host memory is registered, and for how long at most",
        ),
        "ready": Question(
            *(parts.ready, ("7B",), 11),
            "`hearth serve` until a worker can host models, by parts: imports, fork, context, memory, ...",
        ),
        "first": Question(
            *(parts.first, ("7B", "13B"), 25),
            "the first request of a service that has just started, its model in files",
        ),
        "kill": Question(
            *(parts.kill, ("7B",), 15),
            "the worker dies in the middle of a stream: the pause, and how long its process takes to end",
        ),
        "model": Question(
            *(partial(parts.model, names=started), started, 10 * len(started)),
            "a start from host memory, the first in its process, to the first token, over bytes / bandwidth",
        ),
        "others": Question(
            *(beside.others, (beside.RUNNING, beside.OTHER), 25),
            "gaps between a running model's tokens: alone, while another is restored, beside one that stays",
        ),
        "burst": Question(
            *(arrivals.burst, (arrivals.MODEL,), 40),
            "64 requests at once to a model that has just started, with a snapshot and without",
        ),
        "poisson": Question(
            *(arrivals.poisson, (arrivals.MODEL,), 105),
            "requests at random to such a one, 2 and 10 a second with ShareGPT lengths, likewise",
        ),
    }


def ask_each(setting: Setting, asked: Mapping[str, Question]) -> Iterator[tuple[str, dict[str, object]]]:
    """Ask one question after the other and yield the answers; one that fails has its error for an answer."""
    models = dict.fromkeys(model for question in asked.values() for model in question.models)
    captured = dict.fromkeys(model for question in asked.values() for model in question.captured)
    for name, question in asked.items():
        began_s = time.perf_counter()
        try:
            setting.compile_kernels(captured | models)
            if question.models:  # those of all parts, by one service; not before graphs had the device
                setting.make_ready(models)
            began_s = time.perf_counter()
            part = question.ask(setting)
        except Exception as error:  # the other parts may do better
            traceback.print_exc()
            part = Part.failed(error)
        for row in part.rows:
            tell(f"{name}: {row.measure}: {row.value:.4g} {row.unit}, bound {row.bound}, aim {row.aim}")
        if part.error is not None:
            tell(f"{name}: ERROR: {part.error}")
        yield name, {"environment": environment(), **part.as_json(time.perf_counter() - began_s)}


def merged(
    answers: Mapping[str, Mapping[str, object]], order: Sequence[str], *, is_tiny: bool
) -> dict[str, Mapping[str, object]]:
    """Return answers with those that were saved before to questions which were not asked now.

    Each says when and on what it was measured.
    """
    path = result_path("coldstart")
    before = json.loads(path.read_text()) if path.exists() else {}
    saved: Mapping[str, Mapping[str, object]] = before["results"] if before.get("is_tiny") == is_tiny else {}
    dated = {name: {"environment": before.get("environment"), **answer} for name, answer in saved.items()}
    found = {**dated, **answers}
    return {name: found[name] for name in order if name in found}


def main() -> None:
    names = list(questions())
    described = "\n".join(one.line(name) for name, one in questions().items())
    parser = arguments((__doc__ or "").replace("{parts}", described))
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), metavar="MODEL", help="of graphs and model"
    )
    parser.add_argument("--host-bytes", type=int, help="of the host tier; 41e9 if not given")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    options = parser.parse_args()
    scale = TINY_SCALE if options.tiny else Scale()
    if options.host_bytes is not None:
        scale = replace(scale, host_bytes=options.host_bytes)
    place = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=options.place))
    signal.signal(signal.SIGTERM, _end)  # so that no service outlives this
    setting = Setting(scale, place)
    asked = {name: one for name, one in questions(options.models).items() if name in options.only}
    answers = dict[str, dict[str, object]]()

    def result(answers: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
        rows = [row for answer in answers.values() for row in answer["rows"]]  # type: ignore[attr-defined] # JSON
        made = {"models": setting.made, "failures": setting.failures, "compile_s": setting.compile_s}
        about = {"is_tiny": options.tiny, "host_bytes": scale.host_bytes}
        return {**about, "rows": rows, "made": made, "results": answers}

    try:
        for name, answer in ask_each(setting, asked):
            answers[name] = answer
            if options.save:  # so that a run which is cut off has not been for nothing
                keep("coldstart", result(merged(answers, names, is_tiny=options.tiny)))
    finally:
        setting.stop()
        shutil.rmtree(place, ignore_errors=True)
        emit("coldstart", result(answers), save=False)
    if any(answer["error"] for answer in answers.values()):
        sys.exit(1)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(f"ended by signal {number}")


if __name__ == "__main__":
    main()
