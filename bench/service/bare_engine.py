"""The engine alone in a process of its own, asked through a pipe, to compare the service with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.service.process import machine_cpu_s
from hearth import LLM, SamplingParams
from hearth.core.config import EngineConfig

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    prompts: Tokens
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    seconds: float
    cpu_s: float
    others_cores: float  #: that other processes kept busy meanwhile


class Bare:
    """An engine without text, gateway or sockets."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def generate(self, prompts: Tokens, num_new_tokens: int) -> Done:
        """Have all prompts answered at once."""
        self._pipe.send(Job(prompts, num_new_tokens))
        done = self._pipe.recv()
        assert isinstance(done, Done), f"{done=}"
        return done


@contextmanager
def bare(directory: Path, config: EngineConfig, num_threads: int) -> Iterator[Bare]:
    """Load a model in a process that ends with the context."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(
        target=_serve, args=(there, directory, config, num_threads), daemon=True
    )
    process.start()
    there.close()
    try:
        yield Bare(here)
    finally:
        here.close()
        process.join()


def _serve(pipe: Connection, directory: Path, config: EngineConfig, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    with LLM(directory, device="cpu", engine=config, skip_tokenizer_init=True) as llm:
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            params = SamplingParams(temperature=0.0, max_tokens=job.num_new_tokens, ignore_eos=True)
            began_s, cpu_s, machine_s = time.perf_counter(), time.process_time(), machine_cpu_s()
            llm.generate(job.prompts, params)
            seconds = time.perf_counter() - began_s
            cpu_s, machine_s = time.process_time() - cpu_s, machine_cpu_s() - machine_s
            pipe.send(Done(seconds, cpu_s, round(max(0.0, machine_s - cpu_s) / seconds, 2)))
