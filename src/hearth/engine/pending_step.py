"""A launched step: its tokens are copied to the host, waited for and returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from hearth.core.types import TokenLogprob, TokenLogprobs
from hearth.engine.prompt_reader import RowRead, StepReads
from hearth.engine.sampler import Samples


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None  #: as many as each row requested; None: none did
    broken_rows: list[int]  #: row indices of the plan, non-sampling rows included: see `commit`
    reads: Mapping[int, RowRead] = field(default_factory=dict)  #: by row index of the plan


class StepInFlight(Protocol):
    @property
    def end(self) -> torch.cuda.Event | None:
        """Recorded behind the part of the step on this device; None: on a CPU."""

    @property
    def is_computed(self) -> bool:
        """True if nothing is left to wait for since it was launched."""

    @property
    def is_done(self) -> bool: ...

    @property
    def may_wait(self) -> bool:
        """False while other workers compute the step: waiting would block other models on this one."""

    def wait(self) -> StepResult: ...


class PendingStep:
    """A step whose tokens are sampled on this device."""

    def __init__(
        self, samples: Samples, num_samples: int, host: torch.Tensor, reads: StepReads | None = None
    ) -> None:
        """Queue the copies to the host. `host` must not be written until `wait`.

        The first `num_samples` rows have sampled; others were only computed.
        """
        self._chosen, self._num_samples = host.copy_(samples.chosen, non_blocking=True), num_samples
        parts = (samples.logprobs, samples.top_ids, samples.top_logprobs)
        self._logprobs, self._top_ids, self._top_logprobs = (
            None if part is None else _to_host(part) for part in parts
        )
        self._num_logprobs = samples.num_logprobs
        self._reads = None if reads is None else _reads_to_host(reads)
        self.end = _end_of(samples.chosen)

    @property
    def is_computed(self) -> bool:
        return self.end is None

    @property
    def is_done(self) -> bool:
        return self.end is None or bool(self.end.query())  # type: ignore[no-untyped-call] # untyped

    @property
    def may_wait(self) -> bool:
        return True

    def wait(self) -> StepResult:
        if self.end is not None:
            self.end.synchronize()
        tokens, best_bits = self._chosen.numpy().T
        is_broken = ~np.isfinite(best_bits.view(np.float32))
        reads = {} if self._reads is None else dict(self._reads.rows())
        is_broken[[index for index, read in reads.items() if not read.is_finite]] = True
        broken_rows = np.flatnonzero(is_broken).tolist()
        return StepResult(tokens[: self._num_samples].tolist(), self._asked_logprobs(), broken_rows, reads)

    def _asked_logprobs(self) -> list[TokenLogprobs | None] | None:
        if self._logprobs is None:
            return None
        tops = (self._top_ids, self._top_logprobs)
        top_ids, top_logprobs = ([[]] * len(self._logprobs) if top is None else top.tolist() for top in tops)
        rows = zip(self._num_logprobs, self._logprobs.tolist(), top_ids, top_logprobs, strict=True)
        return [
            None if num is None else TokenLogprobs(own, tuple(map(TokenLogprob, ids[:num], best[:num])))
            for num, own, ids, best in rows
        ]


class PendingCopy:
    """The output of a stage, on its way to where the next stage finds it."""

    def __init__(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self.out = out.copy_(hidden, non_blocking=True)
        self.end = _end_of(hidden)

    def wait(self) -> torch.Tensor:
        if self.end is not None:
            self.end.synchronize()
        return self.out


def _end_of(tensor: torch.Tensor) -> torch.cuda.Event | None:
    if not tensor.is_cuda:
        return None
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # untyped
    end.record()
    return end


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for copies of a tensor; in a dry run, the tensor itself."""
    if tensor.is_meta:
        return tensor
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _reads_to_host(reads: StepReads) -> StepReads:
    return replace(
        reads,
        pooled=_to_host(reads.pooled),
        logprobs=_to_host(reads.logprobs),
        ranks=_to_host(reads.ranks),
        top_ids=_to_host(reads.top_ids),
        top_logprobs=_to_host(reads.top_logprobs),
    )
