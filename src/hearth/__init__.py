"""Hearth: serverless inference for large language models. `LLM` needs torch and is imported
on first use, and so are the classes beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hearth.inputs import LoRARequest, RequestOutputKind, StructuredOutputsParams, TextPrompt, TokensPrompt
from hearth.inputs import RequestParams as SamplingParams
from hearth.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from hearth.system.cpus import wait_policy

if TYPE_CHECKING:
    from hearth.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from hearth.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

# Before anything here imports torch, which reads both once.
wait_policy()
os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else each process leaves a map for perf in /tmp, on an ARM


def __getattr__(name: str) -> object:
    if name == "LLM":
        from hearth.llm import LLM

        return LLM
    if name in ("AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"):
        from hearth import async_llm

        return getattr(async_llm, name)
    raise AttributeError(f"module `hearth` has no attribute `{name}`")
