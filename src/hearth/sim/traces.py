"""Requests of a workload: when each came, from which tenant, and its length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hearth.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TracedRequest:
    arrival_s: float
    tenant: str  #: the model, function or client that the trace tells apart
    num_input_tokens: int
    num_output_tokens: int
    #: Each of its requests repeats all that was said before; None: the request stands alone.
    conversation: int | None = None
    key: str | None = None  #: the name of the API key that is charged


@dataclass(frozen=True, slots=True)
class Trace:
    name: str  #: for people
    requests: tuple[TracedRequest, ...]

    def __post_init__(self) -> None:
        for early, late in pairwise(self.requests):
            assert early.arrival_s <= late.arrival_s, f"not in order: {early} {late}"

    @staticmethod
    def of(name: str, requests: Sequence[TracedRequest]) -> Trace:
        """Return requests as a trace, sorted by arrival; equal times keep their order."""
        return Trace(name, tuple(sorted(requests, key=lambda request: request.arrival_s)))

    @property
    def tenants(self) -> list[str]:
        counts = Counter(request.tenant for request in self.requests)
        return sorted(counts, key=lambda tenant: (-counts[tenant], tenant))

    def window(self, begin_s: float, length_s: float = math.inf) -> Trace:
        """Return the requests of a window, which becomes the beginning of the new trace."""
        if not begin_s >= 0.0 or not length_s > 0.0:
            raise ConfigError(
                f"a window of a trace begins at 0 s or later and lasts longer than 0 s, "
                f"given: from {begin_s:g} s for {length_s:g} s"
            )
        return Trace(
            self.name,
            tuple(
                replace(request, arrival_s=request.arrival_s - begin_s)
                for request in self.requests
                if begin_s <= request.arrival_s < begin_s + length_s
            ),
        )

    def at_speed(self, speed: float) -> Trace:
        if not 0.0 < speed < math.inf:
            raise ConfigError(f"the speed of a trace is above 0, given: {speed:g}")
        return Trace(self.name, tuple(replace(one, arrival_s=one.arrival_s / speed) for one in self.requests))

    def cut(self, max_input_tokens: int | None = None, max_output_tokens: int | None = None) -> Trace:
        for name, limit in (("max_input_tokens", max_input_tokens), ("max_output_tokens", max_output_tokens)):
            if limit is not None and limit < 1:
                raise ConfigError(f"`{name}` leaves at least 1 token, given: {limit}")
        return Trace(
            self.name,
            tuple(
                replace(
                    one,
                    num_input_tokens=min(one.num_input_tokens, max_input_tokens or one.num_input_tokens),
                    num_output_tokens=min(one.num_output_tokens, max_output_tokens or one.num_output_tokens),
                )
                for one in self.requests
            ),
        )

    def models_by_tenant(self, models: Sequence[str]) -> dict[str, str]:
        """Return a model for each tenant, round robin, the busiest of these first."""
        if not models:
            raise ConfigError("a trace is mapped to at least 1 model, given: none")
        return {tenant: models[rank % len(models)] for rank, tenant in enumerate(self.tenants)}

    def mapped(self, models: Sequence[str]) -> Trace:
        """Return the same requests, each for a model."""
        model_of = self.models_by_tenant(models)
        return Trace(self.name, tuple(replace(one, tenant=model_of[one.tenant]) for one in self.requests))
