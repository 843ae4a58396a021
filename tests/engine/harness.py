"""Engines over tiny random models, and the reference that judges them: transformers, in float32."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count
from pathlib import Path

import numpy as np
import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import HearthError
from hearth.core.sizes import sampler_buffers
from hearth.core.types import FinishReason, PromptReading, RequestId, SamplingParams
from hearth.engine.assemble import Memory, ModelSpec, assemble, own_limits
from hearth.engine.engine import Engine
from hearth.engine.pending_step import PendingStep, StepResult
from hearth.engine.sampler import Sampler, SampleRows, Samples
from hearth.engine.upload import Uploads
from hearth.models.arch import Arch
from hearth.models.buffers import zeroed
from hearth.models.dtypes import DTYPES
from hearth.models.families import read_arch
from hearth.models.layout import Layout, layout_of
from hearth.models.weights import bind, contiguous_places
from hearth.policy.batch.plan import Admission, EngineRequest, StepPlan
from tests.models.zoo import build, pack_directory

#: DESIGN of "the same tokens": where the reference's two best logits are closer than this, either is right.
TIE = 1e-4

#: Without a limit by time: plans are the same in every run.
ROOMY = EngineConfig(max_batch_tokens=256, max_seqs=8, max_step=-1, block_tokens=4, kv_bytes=64 << 20)
#: More steps than any prompt of these tests has tokens: so many in vain are not followed by another outcome.
MAX_IDLE_STEPS = 2000


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    finish_reason: FinishReason | None = None
    error: HearthError | None = None
    reading: PromptReading | None = None


#: How often a reference's near tie was decided the other way; printed at the end of the run.
TIES: Counter[str] = Counter()


def new_sampler(num_slots: int, vocab_size: int, device: torch.device) -> Sampler:
    """Return a sampler with memory of its own."""
    buffers = zeroed(sampler_buffers(num_slots, vocab_size), device, None)
    return Sampler(buffers, vocab_size, Uploads(device))


def engine_for(
    name: str,
    config: EngineConfig = ROOMY,
    device: str = "cpu",
    eos_ids: frozenset[int] = frozenset(),
    dtype: str = "float32",
) -> Engine:
    arch, layout, packed = packed_once(name, dtype)
    base = packed.to(device, copy=True)
    return _engine(arch, layout, base, torch.device(device), config, eos_ids, dtype)


@cache
def packed_once(name: str, dtype: str) -> tuple[Arch, Layout, torch.Tensor]:
    """The weights of a variant as engines have them, packed once per process. Do not change them."""
    directory = build(name).directory
    arch = read_arch(directory)
    layout = layout_of(arch, dtype, "none")
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8)
    pack_directory(directory, arch, layout, packed)
    return arch, layout, packed


def engine_over(
    directory: Path,
    config: EngineConfig = ROOMY,
    device: str = "cpu",
    eos_ids: frozenset[int] = frozenset(),
    dtype: str = "float32",
    tokenizer_json: Path | None = None,
    memory: Callable[[ModelSpec], Memory] | None = None,
    quant: str = "none",
) -> Engine:
    """Of the checkpoint that is saved there."""
    arch = read_arch(directory)
    layout = layout_of(arch, dtype, quant)
    base = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    pack_directory(directory, arch, layout, base)
    return _engine(arch, layout, base, torch.device(device), config, eos_ids, dtype, tokenizer_json, memory)


def _engine(
    arch: Arch,
    layout: Layout,
    base: torch.Tensor,
    device: torch.device,
    config: EngineConfig,
    eos_ids: frozenset[int],
    dtype: str,
    tokenizer_json: Path | None = None,
    memory: Callable[[ModelSpec], Memory] | None = None,
) -> Engine:
    """Of the weights in `base`, which are on the device."""
    weights = bind(arch, layout, contiguous_places(layout, base))
    limits = own_limits(config, arch, DTYPES[dtype], device)
    spec = ModelSpec(arch, DTYPES[dtype], arch.max_positions, limits, eos_ids, tokenizer_json)
    return assemble(spec, weights, config, device, memory and memory(spec))


def kv_bytes(engine: Engine, num_blocks: int) -> int:
    """Enough for so many blocks, the sink not counted."""
    return (num_blocks + 1) * engine.runner.layers.kv[0].nbytes


_numbers = count()


def ask(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """Run the prompts to their ends, all added at once."""
    return run(engine, [engine.request(new_id(), prompt, params) for prompt in prompts])


def new_id() -> RequestId:
    return RequestId(f"t{next(_numbers)}")


def run(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    """Run requests to their ends, all added at once."""
    answers = {request.request_id: Answer([]) for request in requests}
    for request in requests:
        engine.add(request)
    num_idle = 0
    while engine.has_work:
        outcome = engine.step()
        if not outcome.has_run and engine.is_computing:
            time.sleep(0.001)  # other stages compute on threads
        num_idle = 0 if outcome.outputs or outcome.failures else num_idle + 1
        if num_idle and engine.is_computing:
            time.sleep(0.001)  # other stages are at work
        assert num_idle < MAX_IDLE_STEPS, f"{num_idle} steps gave nobody anything; done so far: {answers}"
        for output in outcome.outputs:
            answer = answers[output.request_id]
            assert answer.finish_reason is answer.error is None, "a request ended twice"
            answer.tokens.append(output.token)
            answer.finish_reason = output.finish_reason
            answer.reading = answer.reading or output.reading
        for failure in outcome.failures:
            answer = answers[failure.request_id]
            assert answer.finish_reason is answer.error is None, "a request ended twice"
            answer.error = failure.error
    engine.batcher.check()
    return list(answers.values())


def admissions_of(engine: Engine) -> list[Admission]:
    """Fills up as the engine plans: who took a slot, in order."""
    admissions: list[Admission] = []
    plan = engine.batcher.plan

    def watched_plan(
        max_prompt_tokens: int | None = None, max_lone_tokens: int | None = None
    ) -> StepPlan | None:
        made = plan(max_prompt_tokens, max_lone_tokens)
        admissions.extend(made.admissions if made else ())
        return made

    engine.batcher.plan = watched_plan  # type: ignore[method-assign] # the only way to look on
    return admissions


def greedy(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def sample_rows(
    slots: Sequence[int],
    positions: int | Sequence[int],
    masks: Mapping[int, bytes] | None = None,
    device: torch.device | str = "cpu",
) -> SampleRows:
    """Rows of these slots, at one position or each at its own."""
    last = np.broadcast_to(np.array(positions, np.int32) - 1, len(slots))
    own = np.array(slots, np.int32)
    on_device = (torch.from_numpy(column.copy()).to(device) for column in (own, last))
    return SampleRows(own, last, masks or {}, *on_device)


def sample(sampler: Sampler, logits: torch.Tensor, rows: SampleRows) -> Samples:
    """Sample as a runner does, and keep what was chosen."""
    sampler.take_best(logits, rows.device_slots)
    samples = sampler.sample(logits, rows)
    return replace(samples, chosen=samples.chosen.clone())


def waited(samples: Samples) -> StepResult:
    """Return the result of a step that has sampled these."""
    host = torch.empty_like(samples.chosen, device="cpu")
    return PendingStep(samples, len(samples.chosen), host).wait()


@lru_cache(maxsize=512)
def reference_logits(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """float32 [tokens, vocab] of one uncached pass through transformers."""
    model, _ = build(name)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_greedy(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Every token is the best one, given those before it, by the reference. Returns, and counts, ties."""
    return assert_best(reference_logits(name, (*prompt, *tokens)), prompt, tokens)


def assert_best(logits: torch.Tensor, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """As `assert_greedy`, by the reference's logits of prompt and tokens."""
    logits = logits[len(prompt) - 1 : -1]
    best = logits.max(-1)
    ties = 0
    for at, token in enumerate(tokens):
        margin = float(best.values[at] - logits[at, token])
        assert margin < TIE, f"token {at}: {token} is {margin} below {int(best.indices[at])}"
        ties += int(best.indices[at]) != token
    TIES.update(tokens=len(tokens), ties=ties)
    return ties


def prompts_for(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
