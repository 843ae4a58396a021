"""How long a first token takes behind the last byte of a load, where others answer and its step has no graph.

A small model answers all the while, so no step of another follows its load layer by layer. The others come in
turn, each takes the place of the one before, and each is asked for one token: its step is the first behind a
load, so it is launched kernel by kernel and leaves no graph. It shares the interpreter with all the threads
of a worker, which an engine by itself (`steps.py`) does not.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

from bench.profile.moves import (
    budget_of,
    hosting_order,
    hosting_orders,
    new_request,
    wait_for_load,
    worker_setting,
)
from bench.profile.scale import Scale
from bench.report import step, tell
from bench.reuse.worker import WorkerClient, working
from hearth.core.messages import CancelRequest, RetireModel
from hearth.core.types import ModelId

ANSWERING = ModelId("answering")
#: Tokens of prompts, a padded size each. The first time that a size comes counts for nothing: libraries load
#: the kernels that they have for it.
PROMPT_TOKENS = (40, 100, 180)
NUM_ROUNDS = 3  #: through all sizes, the first one included


def measure_behind_loads(scale: Scale, device: torch.device) -> dict[str, float]:
    """Return by shape the seconds from the end of a load to the token of a step without a graph."""
    scale = replace(scale, switch_prompt=max(PROMPT_TOKENS))
    small = replace(scale, shapes=scale.shapes[:1])
    with tempfile.TemporaryDirectory(prefix="hearth-profile-", dir=scale.memory_place) as place:
        with step("behind loads: writing models"):
            orders = hosting_orders(scale, device, Path(place))
            directory = Path(place) / ANSWERING
            answering = hosting_order(scale, device, directory, scale.shapes[0], seed=len(orders))
        with working(
            *(worker_setting(scale, device), Path(place), {**orders, ANSWERING: answering}),
            budget_of(scale, device) + budget_of(small, device),
            is_mapped=True,
        ) as worker:
            worker.segment.wait_pinned()
            times = _Rig(worker, list(orders), scale).measure()
    names = {shape.name for shape in scale.shapes}
    return {model: max(0.0, scale.typical(found)) for model, found in times.items() if model in names}


class _Rig:
    """A worker, a model that answers, and others that come and go beside it. Mutable in its worker alone."""

    def __init__(self, worker: WorkerClient, models: list[ModelId], scale: Scale) -> None:
        self._worker, self._models, self._scale = worker, models, scale
        self._draw, self._runs = Random(2), itertools.count(1)

    def measure(self) -> dict[ModelId, list[float]]:
        self._worker.load(ANSWERING)
        last: ModelId | None = None
        times = defaultdict[ModelId, list[float]](list)
        for round_number, num_tokens in itertools.product(range(NUM_ROUNDS), PROMPT_TOKENS):
            for model in self._models:
                took_s = self._behind_s(model, last, num_tokens)
                last = model
                if round_number and took_s is not None:
                    times[model].append(took_s)
                    tell(f"  {model}, {num_tokens} tokens: {1e3 * took_s:.2f} ms behind its load")
        return times

    def _behind_s(self, model: ModelId, last: ModelId | None, num_tokens: int) -> float | None:
        """Have a model come in place of another and answer; None: nothing of it was missing."""
        worker = self._worker
        beside = self._ask(ANSWERING, num_tokens, self._scale.turn_tokens)
        worker.first_token(beside)
        if last is not None:
            worker.send(RetireModel(last))
        worker.host(model)
        asked = self._ask(model, num_tokens, num_new_tokens=1)
        loaded, loaded_s, first_s = wait_for_load(worker, asked)
        worker.send(CancelRequest(beside))
        worker.rest()
        return first_s - loaded_s if sum(use.num_bytes for use in loaded.rungs) else None

    def _ask(self, model: ModelId, num_tokens: int, num_new_tokens: int) -> int:
        run = next(self._runs)
        self._worker.send(new_request(self._draw, self._scale, run, model, num_tokens, num_new_tokens))
        return run
