"""How long a step of an engine takes, from measured steps.

    rows_s(rows) + context_s_per_token * context                           decode rows alone
    max(rows_s(rows), tokens_s(tokens)) + context_s_per_token * context    prompts, also beside decode rows
    start_s                                                                more, if no step ran before

`rows_s` and `tokens_s` are monotone lines through measurements; reading one token of KV costs the same
everywhere. So more rows, tokens or context never make a step shorter. Attention to earlier context costs one
read, which is too little for the later chunks of very long prompts.

Steps are launched one ahead of the device, so the host's part overlaps with the step before. `start_s` is
what prompts alone took longer than the same tokens beside decode rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from msgspec.structs import replace as replace_struct

from hearth.snapshot.cost_profile import MeasuredStep


@dataclass(frozen=True, slots=True)
class Line:
    """A monotone piecewise linear function. Level before the first point, straight on after the last."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @staticmethod
    def through(points: Mapping[float, float]) -> Line:
        """Return the closest monotone line: neighbours that fall are put at their mean."""
        xs = sorted(points)
        levels: list[list[float]] = []  # points that share a height
        for x in xs:
            levels.append([max(0.0, points[x])])
            while len(levels) > 1 and fmean(levels[-2]) > fmean(levels[-1]):
                levels[-2:] = [levels[-2] + levels[-1]]
        return Line(tuple(xs), tuple(fmean(level) for level in levels for _ in level))

    def at(self, x: float) -> float:
        right = bisect_right(self.xs, x)
        if right == 0 or len(self.xs) == 1:
            return self.ys[0]
        right = min(right, len(self.xs) - 1)
        x0, x1, y0, y1 = self.xs[right - 1], self.xs[right], self.ys[right - 1], self.ys[right]
        return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))

    def scaled(self, factor: float) -> Line:
        return Line(self.xs, tuple(factor * y for y in self.ys))


@dataclass(frozen=True, slots=True)
class StepTimes:
    rows_s: Line  #: of steps with so many decode rows and no context
    tokens_s: Line  #: of steps with so many tokens, of which some are a prompt's
    context_s_per_token: float
    start_s: float  #: that the first step of an engine takes longer which had none under way

    @staticmethod
    def fitted(steps: Sequence[MeasuredStep]) -> StepTimes:
        decode = [step for step in steps if step.num_tokens == step.num_rows]
        prompts = [step for step in steps if step.num_tokens > step.num_rows]
        slope = _context_slope(decode)
        rows_s = Line.through(_means(((step.num_rows, step) for step in decode), slope))
        beside = [step for step in prompts if not _is_first(step)]
        start_s = _start_s(prompts, _with_prompts(rows_s, beside, slope)) if beside else 0.0
        following = [
            replace_struct(step, seconds=step.seconds - start_s) if _is_first(step) else step
            for step in prompts
        ]
        return replace(_with_prompts(rows_s, following, slope), start_s=start_s)

    def step_s(self, num_tokens: int, num_rows: int, context_tokens: int) -> float:
        context_s = self.context_s_per_token * context_tokens
        if num_tokens == num_rows:
            return self.rows_s.at(num_rows) + context_s
        return max(self.rows_s.at(num_rows), self.tokens_s.at(num_tokens)) + context_s

    def measured_s(self, step: MeasuredStep) -> float:
        """Return the seconds of a step as measured: prompts alone include the start."""
        step_s = self.step_s(step.num_tokens, step.num_rows, step.context_tokens)
        return step_s + self.start_s if _is_first(step) else step_s

    def scaled(self, weights: float, kv: float) -> StepTimes:
        return replace(
            self,
            rows_s=self.rows_s.scaled(weights),
            tokens_s=self.tokens_s.scaled(weights),
            context_s_per_token=kv * self.context_s_per_token,
        )


def _is_first(step: MeasuredStep) -> bool:
    """True if a step had prompts alone, whose rows attend only to their own tokens."""
    return step.num_tokens > step.num_rows and step.context_tokens == step.num_tokens


def _with_prompts(rows_s: Line, prompts: Sequence[MeasuredStep], slope: float) -> StepTimes:
    tokens_s = Line.through(_means(((step.num_tokens, step) for step in prompts), slope))
    return StepTimes(rows_s, tokens_s, slope, start_s=0.0)


def _start_s(prompts: Sequence[MeasuredStep], following: StepTimes) -> float:
    """Return what prompts alone took longer than following steps: the weighted median."""
    most_tokens = following.tokens_s.xs[-1]
    first = [step for step in prompts if _is_first(step) and step.num_tokens <= most_tokens]
    ranked = sorted((step.seconds - following.measured_s(step), 1 / step.seconds) for step in first)
    half = sum(weight for _, weight in ranked) / 2
    for longer_s, weight in ranked:
        half -= weight
        if half <= 0:
            return max(0.0, longer_s)
    return 0.0


def _context_slope(steps: Sequence[MeasuredStep]) -> float:
    """Return the seconds per context token: weighted least squares over all counts of rows."""
    above = below = 0.0
    for group in _grouped((step.num_rows, step) for step in steps).values():
        weights = [1 / step.seconds**2 for step in group]
        mean_tokens = sum(w * s.context_tokens for w, s in zip(weights, group, strict=True)) / sum(weights)
        mean_s = sum(w * s.seconds for w, s in zip(weights, group, strict=True)) / sum(weights)
        for weight, step in zip(weights, group, strict=True):
            above += weight * (step.context_tokens - mean_tokens) * (step.seconds - mean_s)
            below += weight * (step.context_tokens - mean_tokens) ** 2
    return max(0.0, above / below) if below else 0.0


def _means(steps: Iterable[tuple[int, MeasuredStep]], slope: float) -> dict[float, float]:
    return {
        key: fmean(step.seconds - slope * step.context_tokens for step in group)
        for key, group in _grouped(steps).items()
    }


def _grouped(steps: Iterable[tuple[int, MeasuredStep]]) -> dict[int, list[MeasuredStep]]:
    groups: dict[int, list[MeasuredStep]] = defaultdict(list)
    for key, step in steps:
        groups[key].append(step)
    return groups
