"""Hearth: serverless inference for large language models. `LLM` needs torch and is imported on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hearth.core.types import SamplingParams
from hearth.system.cpus import wait_policy

if TYPE_CHECKING:
    from hearth.llm import LLM, Completion

__all__ = ["LLM", "Completion", "SamplingParams"]

# Before anything here imports torch, which reads both once.
wait_policy()
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else each process leaves a map for perf in /tmp, on an ARM


def __getattr__(name: str) -> object:
    if name in ("LLM", "Completion"):
        from hearth import llm

        return getattr(llm, name)
    raise AttributeError(f"module `hearth` has no attribute `{name}`")
