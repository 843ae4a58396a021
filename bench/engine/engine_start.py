"""How long does an engine take to start, without weights, in a new process? A Llama-2-7B on a GPU.

python -m bench.engine.engine_start

Prints the seconds of each part as JSON.
"""

from __future__ import annotations

import json
import time

STARTED_S = time.perf_counter()

import torch  # noqa: E402 - its import is part of what is measured

TORCH_S = time.perf_counter() - STARTED_S

from bench.llama7b import new_engine  # noqa: E402
from hearth import LLM, SamplingParams  # noqa: E402
from hearth.core.config import EngineConfig  # noqa: E402

HEARTH_S = time.perf_counter() - STARTED_S - TORCH_S


def start() -> dict[str, float]:
    """Time the parts of an engine start in this process, which should be new."""
    marks = {"import_torch_s": TORCH_S, "import_hearth_s": HEARTH_S}
    at = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal at
        torch.cuda.synchronize()
        marks[name] = time.perf_counter() - at
        at = time.perf_counter()

    torch.zeros(1, device="cuda")
    mark("context_s")
    engine = new_engine(EngineConfig(graphs="lazy"), seed=None)
    mark("buffers_s")
    with LLM.over(engine, None) as llm:
        llm.generate([[1] * 200], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        mark("first_tokens_s")
        engine.runner.capture_all()
        mark("graphs_s")
    return {**marks, "total_s": sum(marks.values())}


if __name__ == "__main__":
    print(json.dumps(start()))
