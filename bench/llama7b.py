"""The shape of Llama-2-7B, for benchmarks that need its sizes and not its wits."""

from __future__ import annotations

import torch

from bench.random_engine import new_engine as new_random_engine
from bench.shape import llama_shape
from hearth.core.config import EngineConfig
from hearth.engine.engine import Engine

SHAPE = llama_shape("7B", "Llama-2-7B", max_positions=4096)
CONFIG, ARCH = SHAPE.config, SHAPE.arch


def new_engine(config: EngineConfig, *, seed: int | None) -> Engine:
    """Return an engine over random weights; without a seed they are whatever the memory holds."""
    return new_random_engine(SHAPE, config, torch.device("cuda"), seed=seed)
