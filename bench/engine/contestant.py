"""A system that answers prompts on this CPU in a process of its own, asked through a pipe.

python -m bench.engine.contestant hearth|transformers MODEL NUM_THREADS

The process loads the model, says so, and then answers each line of its input. It imports nothing but its
system, so that it runs as a user's process would. Judges no answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]


@dataclass(frozen=True, slots=True)
class Job:
    prompts: Tokens
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    seconds: float
    tokens: Tokens


class Contestant:
    """A system that is loaded and waits for prompts. Mutable in nothing but its process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()  # that it is ready

    def generate(self, prompts: Tokens, num_new_tokens: int) -> Answered:
        """Have all prompts answered at once."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(Job(prompts, num_new_tokens))), file=self._process.stdin, flush=True)
        return Answered(**json.loads(self._read()))

    def memory_bytes(self) -> int:
        return psutil.Process(self._process.pid).memory_info().rss

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the system has ended; what it said is above")
        return line


@contextmanager
def started(system: str, model: Path, num_threads: int) -> Iterator[Contestant]:
    """Start a system and wait until it is loaded; its process ends with the context."""
    command = [sys.executable, "-m", "bench.engine.contestant", system, str(model), str(num_threads)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Contestant(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def hearth(path: Path, num_threads: int) -> Generate:
    from hearth import LLM, SamplingParams  # before torch, which reads how threads wait as it is loaded

    llm = LLM(path, device="cpu", dtype="float32")
    _use_threads(num_threads)

    def generate(prompts: Tokens, num_new_tokens: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return generate


def transformers(directory: Path, num_threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    _use_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Tokens, num_new_tokens: int) -> Tokens:
        tokens = torch.tensor(prompts)
        answers = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_new_tokens, do_sample=False
        )
        assert isinstance(answers, torch.Tensor), f"{type(answers)=}"
        return [answer[tokens.shape[1] :] for answer in answers.tolist()]

    return generate


def _use_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)


def serve(system: str, directory: Path, num_threads: int) -> None:
    """Be the process of a system, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    generate = {"hearth": hearth, "transformers": transformers}[system](directory, num_threads)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        began_s = time.perf_counter()
        tokens = generate(job.prompts, job.num_new_tokens)
        answered = Answered(time.perf_counter() - began_s, tokens)
        print(json.dumps(asdict(answered)), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
