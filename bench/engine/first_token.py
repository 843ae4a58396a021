"""Where does the time from a prompt to its first token go, on the host and on the device?

    python -m bench.engine.first_token [--shape 7B] [--prompts 128 2048] [--runs 12] [--many 256x128 64x3500]

Random weights on one GPU, asked through `LLM.stream`, one prompt after the other. Prints a JSON line for each
length, medians: when each part of the way was done, in ms since the prompt was handed over, and likewise for
the device, since the launch began. Then many at once through `LLM.generate`, eight tokens each: when the
first step was launched, and how long the host took behind the last.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median

import torch

from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU
from hearth import SamplingParams
from hearth.engine.pending_step import PendingStep

NUM_WARM = 3
NUM_NEW, NUM_MANY_RUNS = 8, 3  #: tokens of each of many, and how often these are asked after once
#: The parts that many requests have in front of their first step.
FIRST = ("drawn up", "taken by the thread that steps", "planned", "launch begins", "inputs sent", "launched")


class Marks:
    """When each part was done, in the run at hand. Mutable; written by whoever does the part."""

    def __init__(self) -> None:
        self.done_s: dict[str, float] = {}
        self.events: dict[str, torch.cuda.Event] = {}

    def after(self, owner: object, method: str, name: str, *, has_event: bool = False) -> None:
        """Note when the first call of a method in a run returns, by an event also for the device."""
        called: Callable[..., object] = getattr(owner, method)

        def noted(*args: object, **kwargs: object) -> object:
            try:
                return called(*args, **kwargs)
            finally:
                self.note(name, has_event=has_event)

        setattr(owner, method, noted)

    def before(self, owner: object, method: str, name: str, *, has_event: bool = False) -> None:
        """Likewise, when it is called."""
        called: Callable[..., object] = getattr(owner, method)

        def noted(*args: object, **kwargs: object) -> object:
            self.note(name, has_event=has_event)
            return called(*args, **kwargs)

        setattr(owner, method, noted)

    def last(self, owner: object, method: str, name: str) -> None:
        """Note when the last call of a method returns."""
        called: Callable[..., object] = getattr(owner, method)

        def noted(*args: object, **kwargs: object) -> object:
            try:
                return called(*args, **kwargs)
            finally:
                self.done_s[name] = time.perf_counter()

        setattr(owner, method, noted)

    def note(self, name: str, *, has_event: bool = False) -> None:
        if name in self.done_s:
            return
        if has_event:
            self.events[name] = torch.cuda.Event(enable_timing=True)
            self.events[name].record()
        self.done_s[name] = time.perf_counter()


def watch(rig: Rig) -> Marks:
    marks, engine, runner = Marks(), rig.engine, rig.engine.runner
    marks.after(rig.llm, "_request", "checked")
    marks.before(rig.llm._loop, "add", "drawn up")
    marks.before(engine, "add", "taken by the thread that steps")
    marks.after(engine.batcher, "plan", "planned")
    marks.before(runner, "launch", "launch begins", has_event=True)
    marks.after(runner.layers.inputs, "fill", "inputs sent", has_event=True)
    marks.after(runner.layers, "run", "graphs queued", has_event=True)
    marks.after(runner, "launch", "launched", has_event=True)
    marks.after(PendingStep, "wait", "waited")
    marks.after(engine.batcher, "take_tokens", "committed")
    marks.last(PendingStep, "wait", "last waited")
    marks.last(engine.batcher, "take_tokens", "last committed")
    return marks


def ask(rig: Rig, marks: Marks, prompt: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    marks.done_s.clear()
    marks.events.clear()
    began_s = time.perf_counter()
    next(iter(rig.llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1))))
    marks.note("received")
    time.sleep(0.005)  # the thread that steps has done all by then
    torch.cuda.synchronize()
    host = {name: 1e3 * (done_s - began_s) for name, done_s in marks.done_s.items()}
    events, first = marks.events, marks.events["launch begins"]
    return host, {name: first.elapsed_time(event) for name, event in events.items() if event is not first}


def ask_many(rig: Rig, marks: Marks, prompts: list[list[int]]) -> dict[str, float]:
    marks.done_s.clear()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    began_s = time.perf_counter()
    rig.llm.generate(prompts, params)
    ended_s = time.perf_counter()
    time.sleep(0.005)
    done_s, last = marks.done_s, ("last waited", "last committed")
    found = {name: 1e3 * (at_s - began_s) for name, at_s in done_s.items() if name in FIRST}
    return found | {f"{name}, before the end": 1e3 * (ended_s - done_s[name]) for name in last}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(row[name] for row in rows), 3) for name in rows[0]}


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.first_token")
    parser.add_argument("--shape", default="7B")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--many", nargs="*", default=[], metavar="NUMBERxLENGTH")
    given = parser.parse_args()
    with opened(GPU.shapes[given.shape], GPU, torch.device("cuda", 0)) as rig:
        for length in given.prompts:
            unwatched = rig.first_tokens_ms(length, given.runs)
            spread = {"median": round(median(unwatched), 3), "least": round(min(unwatched), 3)}
            print(json.dumps({"prompt": length, "unwatched_ms": spread}), flush=True)
        marks = watch(rig)
        for length in given.prompts:
            asked = rig.prompts.take(NUM_WARM + given.runs, length)
            found = [ask(rig, marks, prompt) for prompt in asked][NUM_WARM:]
            told = {"host": medians([one[0] for one in found]), "device": medians([one[1] for one in found])}
            print(json.dumps({"prompt": length, **told}), flush=True)
        for many in given.many:
            number, length = map(int, many.split("x"))
            rows = [ask_many(rig, marks, rig.prompts.take(number, length)) for _ in range(1 + NUM_MANY_RUNS)]
            print(json.dumps({"many": many, **medians(rows[1:])}), flush=True)


if __name__ == "__main__":
    main()
