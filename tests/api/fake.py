"""A gateway with a script: what the API needs of the real one, without models and workers.

Its streams, tokenizer and views are the real ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest

from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.preset import DeployedPreset, Preset
from hearth.control.keys.key_admission import KeyAdmission, KeyAdmissions
from hearth.control.keys.key_usage import KeyUsage
from hearth.control.keys.keys import ApiKeys
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.views import Explanation, Health, ModelView, ProcessView, UnloadView, UpstreamView
from hearth.control.requests.caller import OPERATOR, Caller, GroupId, KeyTerms
from hearth.control.requests.correlation import Correlation
from hearth.control.requests.generation import AnswerStream, ChatPrompt, GenerationRequest, TokenDelta
from hearth.core.errors import HearthError, NameTaken, UnknownModel
from hearth.core.types import FinishReason, ModelId, RequestId, TokenLogprob, TokenLogprobs
from hearth.text.tokenizer import Tokenizer

MODEL = ModelView(
    name="tiny",
    aliases=("small",),
    source="/models/tiny",
    where="/data/tiny",
    digest="0123456789abcdef",
    created_at_s=1_700_000_000.5,
    num_bytes=1000,
    num_parameters=250,
    dtype="float32",
    quant="none",
    family="llama",
    max_context=2048,
    has_chat_template=True,
    keep_alive_s=300.0,
    is_pinned=False,
)


def tokens_of(
    *texts: str, finish: FinishReason | None = FinishReason.STOP, tokens: Sequence[int] | None = None
) -> list[TokenDelta]:
    """Return a token per text; the last one ends the answer."""
    ids = tokens if tokens is not None else range(300, 300 + len(texts))
    offsets = accumulate(map(len, texts), initial=0)
    made = [
        TokenDelta(text, token, None, None, offset)
        for text, token, offset in zip(texts, ids, offsets, strict=False)
    ]
    return [*made[:-1], replace(made[-1], finish_reason=finish)]


def with_logprobs(made: Sequence[TokenDelta]) -> list[TokenDelta]:
    """Tokens with a logprob of -0.5, token 301 as the best one, token 302 as impossible."""
    top = (TokenLogprob(301, -0.25), TokenLogprob(302, float("-inf")))
    return [replace(one, logprobs=TokenLogprobs(-0.5, top)) for one in made]


class FakeKeys:
    are_required = True

    def check(self, key: str) -> Caller | None:
        callers = {
            "user-key": Caller("ann", "user", GroupId("ann's")),
            "monitor-key": Caller("eve", "monitor", GroupId("eve's")),
            "admin-key": Caller("bob", "admin", GroupId("bob's")),
            "limited-key": Caller("liz", "admin", GroupId("liz's"), KeyTerms(models=("shop",))),
        }
        return callers.get(key)


@dataclass(frozen=True, slots=True)
class FakeEntry:
    preset: DeployedPreset | None


@dataclass
class FakeGateway:
    """Mutable; used on one event loop. `script` plays one stream: it puts what arrives there."""

    tokenizer_: Tokenizer
    script: Callable[[AnswerStream], None] = lambda stream: stream.put(tokens_of("Hel", "lo"))
    refusal: HearthError | None = None
    status: str = "ok"
    keys: FakeKeys | ApiKeys = field(default_factory=lambda: ApiKeys(Path("/nowhere/keys.json")))
    admin_token: str = "admin-token"
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    requests: list[GenerationRequest] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)  #: of requests and explanations
    correlations: list[Correlation] = field(default_factory=list)  #: of requests
    encoded: list[str | list[int] | ChatPrompt] = field(default_factory=list)
    streams: list[AnswerStream] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    on_cancel: Callable[[], None] = lambda: None
    explanation: Explanation | None = None
    deploy_failure: HearthError | None = None
    done: list[str] = field(default_factory=list)
    now_s: float = 0.0  #: by the clock of limits
    adapters: list[ModelView] = field(default_factory=list)
    ended: list[ExchangeRecord] = field(default_factory=list)  #: HTTP exchanges
    presets: dict[str, Preset] = field(default_factory=dict)  #: by name

    def __post_init__(self) -> None:
        metrics = Metrics()
        self.usage = KeyUsage(Path("/nowhere/usage.json"), set, metrics)
        self.admissions = KeyAdmissions(self.usage, metrics, lambda: self.now_s)
        Counter("hearth_test", "Something to see.", registry=self.metrics).inc()

    @property
    def deployments(self) -> FakeGateway:
        return self

    prompts = views = deployments

    async def prepare(
        self, request: GenerationRequest, admission: KeyAdmission
    ) -> tuple[GenerationRequest, KeyAdmission]:
        self.requests.append(request)
        self.callers.append(admission.caller)
        if self.refusal is not None:
            raise self.refusal
        admission.charge(5 if request.counts_prompt else 0, request.sampling.max_tokens)
        return request, admission

    def start(
        self, prepared: tuple[GenerationRequest, KeyAdmission], correlation: Correlation
    ) -> AnswerStream:
        request, admission = prepared
        self.correlations.append(correlation)
        if self.refusal is not None:
            raise self.refusal
        request_id = RequestId(f"r{len(self.streams)}")

        def cancel() -> None:
            self.cancelled.append(request_id)
            self.on_cancel()

        stream = AnswerStream(request_id, ModelId("tiny"), self.tokenizer_, 5, cancel)
        stream.num_cached_tokens, stream.prompt = 2, (1, 2, 3, 4, 5)
        self.streams.append(stream)
        stream.is_batch = request.is_batch
        if isinstance(request.prompt, list):
            stream.prompt = request.prompt
        admission.follow(stream, counts_prompt=request.counts_prompt)
        self.script(stream)
        return stream

    def count_ignored_fields(self, labels: Sequence[str]) -> None:
        self.ignored += labels

    async def tokenize(
        self, name: str, prompt: str | ChatPrompt, caller: Caller, add_special_tokens: bool | None
    ) -> list[int]:
        self.encoded.append(prompt)
        text = prompt if isinstance(prompt, str) else self.tokenizer_.chat_text(prompt.messages)
        return self.tokenizer_.encode(text, add_special_tokens is not False)

    async def detokenize(self, name: str, tokens: list[int], caller: Caller) -> str:
        self.model(name)
        return self.tokenizer_.decode(tokens, skip_special_tokens=False)

    async def encode(
        self, name: str, prompt: str | list[int] | ChatPrompt, caller: Caller, max_tokens: int | None = None
    ) -> list[int]:
        self.encoded.append(prompt)
        if self.refusal is not None:
            raise self.refusal
        return self.tokenizer_.encode(prompt) if isinstance(prompt, str) else [1, 2, 3]

    def models(self, caller: Caller) -> list[ModelView]:
        self.callers.append(caller)
        return [MODEL, *self.adapters]

    def model(self, name: str, caller: Caller = OPERATOR) -> ModelView:
        name = name.removesuffix(":latest")
        adapter = next((one for one in self.adapters if one.name == name), None)
        if caller.terms.models is not None and name not in caller.terms.models:
            raise UnknownModel(f"no model named `{name}`; deploy it")
        if adapter is not None:
            return adapter
        if name in self.presets:
            return replace(MODEL, name=name, base="tiny", preset=self.presets[name])
        if name not in ("tiny", "small"):
            raise UnknownModel(f"no model named `{name}`, there are: `tiny`; deploy it")
        return MODEL

    def find_for(self, name: str, caller: Caller) -> FakeEntry:
        preset = self.presets.get(name)
        return FakeEntry(None if preset is None else DeployedPreset(name, "tiny", preset, 1.0))

    async def put_preset(self, name: str, base: str, preset: Preset) -> ModelView:
        preset.check()
        self.presets[name] = preset
        return replace(MODEL, name=name, base=self.model(base).name, preset=preset)

    def may_use(self, model: str, caller: Caller) -> bool:
        return caller.terms.models is None or model in caller.terms.models

    async def show(self, name: str, caller: Caller, *, look: bool) -> ModelView:
        self.callers.append(caller)
        if not look:
            return self.model(name)
        return replace(self.model(name), upstream=UpstreamView("unchanged", "v1"))

    async def tokenizer(self, name: str, caller: Caller) -> Tokenizer:
        self.model(name)
        return self.tokenizer_

    async def deploy(self, order: DeployOrder) -> AsyncIterator[dict[str, object]]:
        if order.name in {"tiny", *(one.name for one in self.adapters)} and not order.overwrite:
            raise NameTaken(f"`{order.name}` is taken; use another name")
        yield {"event": "progress", "phase": "converting", "done_bytes": 1, "total_bytes": 2}
        if self.deploy_failure is not None:
            raise self.deploy_failure
        of = ("" if order.base is None else f" of {order.base}") + (" as adapter" if order.is_adapter else "")
        of += "".join(f" on {label}" for label in order.labels)
        self.done.append(
            f"deploy {order.source} {order.name} {order.dtype} {order.quant} {order.overwrite}{of}"
        )
        yield {"event": "done", "model": MODEL}

    async def remove(self, name: str, *, with_adapters: bool = False) -> None:
        self.done.append(f"remove {self.model(name).name}{' with adapters' if with_adapters else ''}")

    async def unload(self, name: str, free: bool) -> UnloadView:
        self.done.append(f"unload {self.model(name).name} {free}")
        return UnloadView(
            name, free, was_loaded=True, num_requests=2, device_bytes=3 << 20, host_bytes=2 << 20
        )

    async def fresh_metrics(self) -> bytes:
        return generate_latest(self.metrics)

    def exchange_ended(self, record: ExchangeRecord) -> None:
        self.ended.append(record)

    async def fresh_ps(self) -> ProcessView:
        return ProcessView((), (), 0, 0)

    def forecast(self, name: str, _: Caller) -> dict[str, str]:
        return {"model": name}

    def explain(self, request_id: str, caller: Caller) -> Explanation | None:
        self.callers.append(caller)
        return self.explanation if request_id == "r0" else None

    def health(self) -> Health:
        return Health(self.status, 1, 1, "0.1.0", "life-1")
