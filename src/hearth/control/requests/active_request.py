"""The requests that have not ended, each with all that another worker needs to continue it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from hearth.control.requests.generation import AnswerStream
from hearth.core.messages import AdapterOrder, KvMove
from hearth.core.types import (
    FinishReason,
    GuideSpec,
    ModelId,
    Pace,
    Pooling,
    RequestId,
    SamplingParams,
    WorkerId,
)
from hearth.policy.fleet.events import ComputedPrompt
from hearth.text.transcript import Transcript


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """Mutable. The text thread writes `emitted`, `transcript` and `text_s`, the loop the rest.

    They never write at once: all tokens of a run pass the text thread, or are dropped there, before the loop
    learns that its worker is lost and gives the request to another. If the worker lives, `handover` parts
    them. Both set `is_complete`; none resets it.
    """

    request_id: RequestId
    model: ModelId  #: that computes it: of an adapter, the base
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = field(repr=False)  #: of the caller's group; secret
    guide: GuideSpec | None
    stream: AnswerStream
    transcript: Transcript
    #: All tokens from workers that became text. The next worker continues from them.
    emitted: list[int] = field(default_factory=list)
    is_complete: bool = False  #: the text has ended; later tokens are ignored
    text_s: float = 0.0  #: to make the text of a token, on average of the last ones
    run: int | None = None  #: None: not on a worker
    worker: WorkerId | None = None
    hosted: ModelId | None = None  #: its model, as that worker hosts it
    #: Held while a token of its run is added, and while it leaves a worker, which may be alive: a token that
    #: came is told to the next worker, and no other one is added any more.
    handover: threading.Lock = field(default_factory=threading.Lock)
    is_first_admission: bool = True  #: it is on its first worker, or on none yet, and never had a slot
    digest: str | None = None  #: of the model that tokenised the prompt; None: any
    pace: Pace = field(default_factory=Pace)
    arrived_s: float = 0.0  #: by the driver's clock
    pooling: Pooling | None = None  #: its embedding is wanted; None: it is not
    adapter: AdapterOrder | None = None  #: None: the bare model
    adapter_bytes: int = 0
    key: str | None = None  #: the name of the caller's API key
    kv: KvMove | None = None  #: that its next worker waits for
    computed_prompt: ComputedPrompt | None = None
    _prompt_began_s: float | None = None  #: None: on no worker yet, on another one, or past its first token

    @property
    def end_without_tokens(self) -> FinishReason | None:
        if self.sampling.max_tokens != 0:
            return None
        return FinishReason.LENGTH if self.pooling is None else FinishReason.STOP

    def admitted(self, began_s: float, num_cached_tokens: int) -> None:
        """Note that a worker gave the request a slot. Users see the cached tokens of the first worker."""
        if self.is_first_admission:
            self.is_first_admission = False
            self.stream.num_cached_tokens = num_cached_tokens
            self._prompt_began_s = began_s

    def delivered(self, now_s: float) -> None:
        """Note a token. The first one ends the time that the prompt took."""
        if self._prompt_began_s is not None:
            num_tokens = len(self.prompt) - self.stream.num_cached_tokens
            self.computed_prompt = ComputedPrompt(num_tokens, now_s - self._prompt_began_s)
            self._prompt_began_s = None

    def detach(self) -> None:
        """Take the request off its worker; another one may continue it."""
        with self.handover:
            self.run = self.worker = self.hosted = self._prompt_began_s = None
        self.is_first_admission = False


class ActiveRequests:
    """Mutable; written on the event loop. The text thread reads `by_run`, one operation at a time."""

    def __init__(self) -> None:
        self.by_id: dict[RequestId, ActiveRequest] = {}
        self.by_run: dict[int, ActiveRequest] = {}  #: those on workers
        self.is_draining = False  #: the service ends: no new request is taken
        self._runs = itertools.count(1)
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._next_end: asyncio.Event | None = None  #: set when a request ends; None: no task waits

    def add(self, request: ActiveRequest) -> None:
        self.by_id[request.request_id] = request
        self._is_empty.clear()

    def start_run(self, request: ActiveRequest, worker: WorkerId, hosted: ModelId) -> int:
        """Put a request on a worker and return the number of its run there."""
        if request.run is not None:
            self.by_run.pop(request.run, None)
        run = next(self._runs)
        request.run, request.worker, request.hosted = run, worker, hosted
        self.by_run[run] = request
        return run

    def on(self, worker: WorkerId, run: int) -> ActiveRequest | None:
        """Return the request of a run; None: it has ended, or is not that worker's."""
        request = self.by_run.get(run)
        return request if request is not None and request.worker == worker else None

    def detach(self, worker: WorkerId, model: ModelId | None = None) -> None:
        """Take all requests off a lost worker, or those of one model; another worker may continue them."""
        for request in list(self.by_run.values()):
            if request.worker == worker and model in (None, request.hosted):
                self.end_run(request)

    def end_run(self, request: ActiveRequest) -> None:
        """Take a request off its worker; another worker may continue it."""
        if request.run is not None:
            self.by_run.pop(request.run, None)
            request.detach()

    def end(self, request: ActiveRequest) -> bool:
        """Forget a request. Returns False if it has ended before."""
        if self.by_id.pop(request.request_id, None) is None:
            return False
        if request.run is not None:
            self.by_run.pop(request.run, None)
        if not self.by_id:
            self._is_empty.set()
        if self._next_end is not None:
            self._next_end.set()
            self._next_end = None
        return True

    def users_of(self, model: str, wheres: Collection[str]) -> set[RequestId]:
        return {
            request.request_id
            for request in self.by_id.values()
            if request.model == model or (request.adapter is not None and request.adapter.where in wheres)
        }

    async def wait_ended(self, requests: set[RequestId]) -> None:
        while not requests.isdisjoint(self.by_id):
            self._next_end = self._next_end or asyncio.Event()
            await self._next_end.wait()

    async def wait_empty(self) -> None:
        await self._is_empty.wait()
