"""A queue of tokens per run whose text is slow to make. Makes no text and measures nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hearth.control.requests.active_request import ActiveRequest
from hearth.core.types import FinishReason, ModelId, TokenLogprobs
from hearth.node.link import FrameLink


@dataclass(frozen=True, slots=True)
class TokenRow:
    request: ActiveRequest
    run: int
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class _LateRun:
    link: FrameLink
    model: ModelId
    rows: deque[TokenRow] = field(default_factory=deque)  #: never empty


@dataclass(frozen=True, slots=True)
class LateRow:
    link: FrameLink
    row: TokenRow


class LateText:
    """Mutable; used by the text thread alone. Runs take turns. Dropped tokens are made again elsewhere."""

    def __init__(self) -> None:
        self._runs: dict[int, _LateRun] = {}  #: by run; whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._runs)

    def has(self, run: int) -> bool:
        return run in self._runs

    def add(self, link: FrameLink, row: TokenRow) -> None:
        model = row.request.hosted or row.request.model
        self._runs.setdefault(row.run, _LateRun(link, model)).rows.append(row)

    def next(self) -> LateRow | None:
        if not self._runs:
            return None
        run = next(iter(self._runs))
        line = self._runs.pop(run)
        row = line.rows.popleft()
        if line.rows:
            self._runs[run] = line
        return LateRow(line.link, row)

    def drop_run(self, run: int) -> None:
        self._runs.pop(run, None)

    def drop(self, link: FrameLink, model: ModelId | None = None) -> None:
        for run, line in list(self._runs.items()):
            if line.link is link and model in (None, line.model):
                del self._runs[run]
