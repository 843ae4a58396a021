"""Shortens `LLM.generate` for tests that ask for one answer to each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hearth import LLM, CompletionOutput
from hearth.core.types import SamplingParams
from hearth.inputs import Adapter, Prompt


def completions(
    llm: LLM,
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    lora_request: Adapter | Sequence[Adapter] = None,
) -> list[CompletionOutput]:
    outputs = llm.generate(prompts, params, lora_request=lora_request)
    return [answer for output in outputs for answer in output.outputs]
