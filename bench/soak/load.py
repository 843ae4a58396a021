"""Random questions to a service, and what became of each. Starts and kills nothing."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.service.client import Connection, Reply, ask, completion, read

VOCAB_SIZE = 512
NUM_REFERENCES = 4  #: questions per model whose answer is known
REFERENCE_TOKENS = 24
#: Where the two best are closer than this, in logarithms, another batch may choose the other of them.
MIN_MARGIN = 1e-3
#: A question that has no whole answer after this is lost.
PATIENCE_S = 120.0
MAX_OPEN = 200  #: questions at a time
KEEP_ALIVES: tuple[object, ...] = (0, 1, "3s", "10s")


@dataclass(frozen=True, slots=True)
class Reference:
    model: str
    prompt: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    kind: str  #: checked, sampled, left, wrong
    model: str
    data: bytes
    text: str | None = None  #: the only right answer
    leave_s: float | None = None  #: hang up after this


@dataclass(slots=True)
class Tally:
    """Counts of what became of the questions. Mutable; written by `Load`."""

    asked: Counter[str] = field(default_factory=Counter)  #: by kind
    ended: Counter[str] = field(default_factory=Counter)  #: by kind and outcome
    #: By outcome, of models that stay: what a service has counted of a model goes with it.
    of_lasting: Counter[str] = field(default_factory=Counter)
    num_held_back: int = 0  #: because too many were open
    violations: list[str] = field(default_factory=list)


class Load:
    """Random questions on their way to a service. Mutable; used on the event loop alone."""

    def __init__(self, port: int, models: Sequence[str], per_s: float, seed: int) -> None:
        """The first model is the most popular one, by Zipf's law. Questions come `per_s`, by Poisson's."""
        self._port, self._models, self._per_s = port, models, per_s
        self._random = random.Random(seed)
        self._weights = [1 / rank for rank in range(1, len(models) + 1)]
        self._open: set[asyncio.Task[None]] = set()
        self.references: list[Reference] = []
        self.tally = Tally()
        #: Models that come and go: that one is not there may be right.
        self.volatile: set[str] = set()

    async def learn(self) -> int:
        """Ask what will be checked once, alone; return how many questions were too close to call."""
        num_close = 0
        for model in self._models:
            for _ in range(NUM_REFERENCES):
                prompt = self._prompt(self._random.randint(4, 40))
                question = completion(model, prompt, REFERENCE_TOKENS, stream=False, logprobs=2)
                reply = await ask(self._port, question)
                answer = read(reply)
                if answer.num_tokens != REFERENCE_TOKENS:
                    raise RuntimeError(f"no reference from `{model}`: {reply.status} {reply.body[-300:]!r}")
                if margin_of(reply) < MIN_MARGIN:
                    num_close += 1
                else:
                    self.references.append(Reference(model, prompt, answer.text))
        return num_close

    async def run(self, seconds: float) -> None:
        """Ask for so long, then wait for what is open."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            await asyncio.sleep(self._random.expovariate(self._per_s))
            if len(self._open) >= MAX_OPEN:
                self.tally.num_held_back += 1
            else:
                task = asyncio.create_task(self._ask(self._question()))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
        await asyncio.gather(*self._open)

    def _question(self) -> Question:
        kind = self._random.choices(["checked", "sampled", "left", "wrong"], [45, 35, 15, 5])[0]
        (model,) = self._random.choices(self._models, self._weights)
        extra: dict[str, object] = {"stream": self._random.random() < 0.7}
        if self._random.random() < 0.2:
            extra["keep_alive"] = self._random.choice(KEEP_ALIVES)
        if kind == "checked":
            known = self._random.choices(
                self.references, [self._weights[self._models.index(r.model)] for r in self.references]
            )[0]
            data = completion(known.model, known.prompt, REFERENCE_TOKENS, **extra)
            return Question(kind, known.model, data, text=known.text)
        if kind == "wrong":
            return self._wrong_question(model)
        tokens = self._random.randint(1, 96)
        leave_s = self._random.expovariate(4.0) if kind == "left" else None
        sampling = {"temperature": self._random.uniform(0.2, 1.5), "seed": self._random.getrandbits(31)}
        data = completion(model, self._prompt(self._random.randint(1, 200)), tokens, **sampling, **extra)
        return Question(kind, model, data, leave_s=leave_s)

    def _wrong_question(self, model: str) -> Question:
        wrong = self._random.choice(["model", "prompt", "sampling"])
        if wrong == "model":
            return Question("wrong", "nobody", completion("nobody", [1], 1))
        if wrong == "prompt":
            return Question("wrong", model, completion(model, [VOCAB_SIZE + 1], 1))
        return Question("wrong", model, completion(model, [1], 1, temperature=-1))

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    async def _ask(self, question: Question) -> None:
        self.tally.asked[question.kind] += 1
        try:
            connection = await Connection.open(self._port)
        except OSError as error:
            self.tally.violations.append(f"nobody listens: {error}")
            return
        try:
            asked = asyncio.create_task(connection.ask(question.data))
            patience_s = PATIENCE_S if question.leave_s is None else question.leave_s
            done, _ = await asyncio.wait((asked,), timeout=patience_s)
            has_left = not done
            connection.close()
            reply = await asked
        finally:
            connection.close()
        outcome = self._judge(question, reply, has_left)
        self.tally.ended[f"{question.kind}: {outcome}"] += 1
        if question.model not in self.volatile:
            self.tally.of_lasting[outcome] += 1

    def _judge(self, question: Question, reply: Reply, has_left: bool) -> str:
        """Return the outcome; what must not be is noted as a violation."""
        if has_left and question.leave_s is not None:
            return "left"
        answer = read(reply)
        if has_left or not reply.is_whole:
            self._violate(question, reply, f"lost: {'no end' if has_left else 'broken off'}")
            return "lost"
        if answer.error is not None:
            if answer.error not in self._allowed(question):
                self._violate(question, reply, f"unexpected error `{answer.error}`")
            return answer.error
        if answer.finish_reason is None or question.kind == "wrong":
            self._violate(question, reply, f"no right end: {answer.finish_reason}")
        if question.text is not None and answer.text != question.text:
            self._violate(question, reply, f"wrong answer: {answer.text!r}, right: {question.text!r}")
        return "answered"

    def _allowed(self, question: Question) -> set[str]:
        if question.kind == "wrong":
            return {"model_not_found", "bad_prompt", "bad_sampling", "bad_request", "invalid_value"}
        gone = {"model_not_found"} if question.model in self.volatile else set()
        return gone | {"overloaded", "workers_lost"}

    def _violate(self, question: Question, reply: Reply, what: str) -> None:
        told = f"{question.kind} `{question.model}` {reply.request_id}: {what}; {reply.body[-200:]!r}"
        self.tally.violations.append(told)


def margin_of(reply: Reply) -> float:
    """Return the least distance between the two best of any of a reply's tokens, in logarithms."""
    choice: Mapping[str, Mapping[str, list[Mapping[str, float]]]] = json.loads(reply.body)["choices"][0]
    ranked = [sorted(best.values(), reverse=True) for best in choice["logprobs"]["top_logprobs"]]
    return min(best[0] - best[1] for best in ranked)
