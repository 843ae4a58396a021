"""What do requests feel of adapters that come and go? A random Llama-2-7B behind a worker's own step loop.

python -m bench.lora.serving [--save] [--layers N] [--adapters N] [--tiny]

    cold     the first token of an adapter that is in host memory and was never on the device, its base idle,
             over that of one that is there
    steps    a batch of 64 that decodes, beside requests for other adapters that are there, and beside such
             whose adapters have to come: how long the steps take, over contexts of the same lengths
    zipf     1,000 adapters asked for as Zipf has it (exponent 1), 64 at a time and each at once followed by
             the next, with room for 100 of them: tokens per second over those with room for all. Answers have
             24 to 72 tokens; where all have 48 ("in waves"), requests whose adapters are there begin and end
             together, 64 prompts in one step, which is not how they come

Adapters are of rank 8, of q and v alone: 8.4 MB each, so that 1,000 of them fit into /dev/shm and into host
memory. Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other.
`--tiny` does the same with a small model on the CPU, to see that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TypeVar

from bench.lora import rows
from bench.lora.library import BASE, TINY, Library, full
from bench.report import arguments, keep, percentiles, step
from bench.reuse.worker import WorkerClient, keeping, working_over
from hearth.core.messages import AdapterLoaded, AdapterOrder, CancelRequest, Fact, StartRequest, StepDone
from hearth.core.types import SamplingParams

AIM_COLD_S, AIM_ZIPF = 0.005, 0.9
#: Requests for other adapters come so many steps apart beside a batch that decodes.
BESIDE_STEPS = 3

Answer = dict[str, object]
T = TypeVar("T", "FirstTokens", "StepTimes", "Throughput")


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times until the first token of requests, beside which nothing else runs."""

    cold_s: Mapping[str, float]
    warm_s: Mapping[str, float]
    more_s: float
    until_placed_s: float  #: of it, until the adapter was found and had its memory
    until_filled_s: float  #: then until its bytes were there
    aim_s: float = AIM_COLD_S


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times between the tokens of a batch that decodes."""

    alone_s: Mapping[str, float]
    beside_adapters_there_s: Mapping[str, float]
    beside_adapters_that_come_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Throughput:
    """As many requests at a time as there are rows."""

    tokens_per_s: float
    loads_per_s: float
    loaded_bytes_per_s: float
    rows_per_step: float  #: that have a token; the others wait for their adapter, or for the next step
    step_s: Mapping[str, float]  #: of steps in which all decode, from the end of the one before
    prompt_step_s: Mapping[str, float]  #: of steps in which some prompts are read
    share_of_prompt_steps: float
    until_admitted_s: Mapping[str, float]  #: from a request to the step that has its prompt
    until_placed_s: Mapping[str, float]  #: of those whose adapter had to come, until it had its memory
    until_filled_s: Mapping[str, float]  #: then until its bytes were there


@dataclass(frozen=True, slots=True)
class AdapterAsk:
    """A request to be made."""

    adapter: AdapterOrder
    max_tokens: int


@dataclass(slots=True)
class StepTally:
    """The facts of a stretch of time. Mutable; written by `zipf`."""

    began_s: float = 0.0
    ended_s: float = 0.0
    num_tokens: int = 0
    step_s: list[float] = field(default_factory=list)
    prompt_step_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)  #: runs that have a token
    loads: list[AdapterLoaded] = field(default_factory=list)

    def note(self, at_s: float, fact: Fact) -> None:
        match fact:
            case AdapterLoaded():
                self.loads.append(fact)
            case StepDone():
                self.num_tokens += len(fact.runs)
                self.waits_s += [one.waited_s for one in fact.admitted]
                has_prompts = not self.begun.issuperset(fact.runs)
                (self.prompt_step_s if has_prompts else self.step_s).append(at_s - self.ended_s)
                self.begun.update(fact.runs)
                self.ended_s = at_s

    def throughput(self) -> Throughput:
        total_s, num_steps = self.ended_s - self.began_s, len(self.step_s) + len(self.prompt_step_s)
        return Throughput(
            tokens_per_s=self.num_tokens / total_s,
            loads_per_s=len(self.loads) / total_s,
            loaded_bytes_per_s=sum(one.num_bytes for one in self.loads) / total_s,
            rows_per_step=self.num_tokens / num_steps,
            step_s=_percentiles(self.step_s),
            prompt_step_s=_percentiles(self.prompt_step_s),
            share_of_prompt_steps=len(self.prompt_step_s) / num_steps,
            until_admitted_s=_percentiles(self.waits_s),
            until_placed_s=_percentiles([one.wait_s for one in self.loads]),
            until_filled_s=_percentiles([one.total_s for one in self.loads]),
        )


def _percentiles(values: Sequence[float]) -> Mapping[str, float]:
    return percentiles(values) if values else {}


@dataclass(slots=True)
class AdapterClient:
    """Whoever asks a worker for adapters. Mutable: prompts are drawn, and facts taken."""

    library: Library
    worker: WorkerClient
    numbers: Iterator[int]
    random: random.Random

    def start(self, adapter: AdapterOrder | None, max_tokens: int) -> int:
        """Ask with a prompt that nobody has asked before."""
        scale, run = self.library.scale, next(self.numbers)
        prompt = tuple(self.random.randrange(256) for _ in range(scale.prompt_tokens))
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.worker.send(StartRequest(run, BASE, prompt, (), sampling, salt=b"", adapter=adapter))
        return run

    def first_token_s(self, adapter: AdapterOrder, loads: list[AdapterLoaded] | None = None) -> float:
        """Ask for one token, and return how long it took. `loads` gets what the worker tells of the load."""
        began_s = time.perf_counter()
        run = self.start(adapter, max_tokens=1)
        while not (heard := self.worker.until(StepDone, AdapterLoaded)).has_token_of(run):
            if loads is not None and isinstance(heard.fact, AdapterLoaded):
                loads.append(heard.fact)
        self.worker.rest()
        return heard.at_s - began_s

    def rolling(self, asks: Sequence[AdapterAsk]) -> Iterator[tuple[float, Fact, int]]:
        """Ask for these, a batch at a time; yield facts with their times and how many are still to come."""
        left = list(reversed(asks))

        def start_next() -> int:
            ask = left.pop()
            return self.start(ask.adapter, ask.max_tokens)

        running = {start_next() for _ in range(min(self.library.scale.batch, len(left)))}
        while running:
            heard = self.worker.until(StepDone, AdapterLoaded)
            if isinstance(heard.fact, StepDone):
                for run in running & heard.fact.finished.keys():
                    running.remove(run)
                    if left:
                        running.add(start_next())
            yield heard.at_s, heard.fact, len(left)

    def run(self, asks: Sequence[AdapterAsk]) -> None:
        for _ in self.rolling(asks):
            pass

    def run_all(self, adapters: Sequence[AdapterOrder], max_tokens: int) -> None:
        self.run([AdapterAsk(adapter, max_tokens) for adapter in adapters])


@contextmanager
def asking(library: Library, socket: Path, num_room: int) -> Iterator[AdapterClient]:
    """A worker with the base and room for so many adapters, over host memory that is pinned."""
    scale = library.scale
    with (
        library.pool(num_room) as new_pool,
        working_over(socket, scale.device, scale.engine, new_pool, {BASE: library.host}) as worker,
    ):
        worker.load(BASE)
        worker.segment.wait_pinned()
        yield AdapterClient(library, worker, count(1 << 20), random.Random(1))


def cold(client: AdapterClient, adapters: Sequence[AdapterOrder]) -> FirstTokens:
    """Adapters that this worker has never seen, one after the other, each once more when it is there."""
    cold_s, warm_s, loads = [], [], list[AdapterLoaded]()
    for adapter in adapters:
        cold_s.append(client.first_token_s(adapter, loads))
        warm_s.append(client.first_token_s(adapter))
    cold, warm = percentiles(cold_s), percentiles(warm_s)
    return FirstTokens(
        *(cold, warm, cold["p50"] - warm["p50"]),
        until_placed_s=statistics.median(one.wait_s for one in loads),
        until_filled_s=statistics.median(one.total_s for one in loads),
    )


def steps(client: AdapterClient, there: Sequence[AdapterOrder], away: Sequence[AdapterOrder]) -> StepTimes:
    """Time the tokens of a batch that decodes, alone and beside others that ask for one token each.

    Each time a batch begins anew: steps take longer as contexts grow, by a tenth in a hundred of them.
    """
    scale = client.library.scale
    batch, others = there[: scale.batch], there[scale.batch :]
    client.run_all([*batch, *others], max_tokens=1)
    warm = [others[number % len(others)] for number in range(len(away))]
    _intervals(client, batch, warm)  # so that steps of all these shapes have been captured
    return StepTimes(*(percentiles(_intervals(client, batch, beside)) for beside in ([], warm, away)))


def _intervals(
    client: AdapterClient, batch: Sequence[AdapterOrder], others: Sequence[AdapterOrder]
) -> list[float]:
    """Return the times between the tokens of a batch, while others are asked for if there are any."""
    scale = client.library.scale
    running = [client.start(adapter, max_tokens=scale.max_context // 2) for adapter in batch]
    for run in running:
        client.worker.first_token(run)
    ends: list[float] = []
    waiting = list(others)
    while len(ends) <= BESIDE_STEPS * (scale.num_swaps + 1):
        heard = client.worker.until(StepDone)
        assert isinstance(heard.fact, StepDone)
        assert running[0] not in heard.fact.finished, "the batch has ended before all was asked"
        if heard.has_token_of(running[0]):
            ends.append(heard.at_s)
            if waiting and len(ends) % BESIDE_STEPS == 0:
                client.start(waiting.pop(), max_tokens=1)
    client.worker.send(*(CancelRequest(run) for run in running))
    client.worker.rest()
    return [after - before for before, after in pairwise(ends)]


def zipf(client: AdapterClient, asks: Sequence[AdapterAsk]) -> Throughput:
    """Tokens per second while the batch is full, the first tenth of the requests left out."""
    num_warm, tally = len(asks) // 10, StepTally()
    for at_s, fact, num_left in client.rolling(asks):
        if num_left > len(asks) - client.library.scale.batch - num_warm:
            tally = StepTally(at_s, at_s)
        elif num_left:
            tally.note(at_s, fact)
    return tally.throughput()


def zipf_requests(library: Library) -> list[AdapterAsk]:
    """Return the requests, the same for every worker."""
    scale = library.scale
    weights = list(accumulate(1 / rank for rank in range(1, len(library.adapters) + 1)))
    drawn = random.Random(2)
    adapters = drawn.choices(library.adapters, cum_weights=weights, k=scale.num_requests)
    least = scale.new_tokens // 2
    return [AdapterAsk(adapter, drawn.randint(least, 2 * scale.new_tokens - least)) for adapter in adapters]


def in_waves(library: Library, asks: Sequence[AdapterAsk]) -> list[AdapterAsk]:
    """Return the same requests, all as long."""
    return [AdapterAsk(ask.adapter, library.scale.new_tokens) for ask in asks]


def answers(library: Library, socket: Path) -> Iterator[Answer]:
    scale, asks = library.scale, zipf_requests(library)
    waves = in_waves(library, asks[: len(asks) // 2])
    with step("room for all"), asking(library, socket, scale.num_adapters) as client:
        with step("all adapters to host memory and to the device"):
            client.run_all(library.adapters, max_tokens=1)
            client.run(asks[: 3 * scale.batch])  # so that steps of all these shapes have been captured
        all_there = yield from _surviving("zipf, room for all", lambda: zipf(client, asks))
        all_in_waves = yield from _surviving("zipf in waves, room for all", lambda: zipf(client, waves))
    with step(f"room for {scale.num_room}"), asking(library, socket, scale.num_room) as client:
        there, away = library.adapters[: scale.num_room], library.adapters[scale.num_room :]
        with step("warming up"):
            client.run_all(there[: scale.batch], max_tokens=4)
            for adapter in there[:3]:
                client.first_token_s(adapter)
        yield from _surviving("cold", lambda: cold(client, away[: scale.num_cold]))
        yield from _surviving("steps", lambda: steps(client, there, away[-scale.num_swaps :]))
        client.run(asks[: 3 * scale.batch])
        few = yield from _surviving(f"zipf, room for {scale.num_room}", lambda: zipf(client, asks))
        few_in_waves = yield from _surviving(
            f"zipf in waves, room for {scale.num_room}", lambda: zipf(client, waves)
        )
        num_there = sum(use.num_bytes > 0 for use in client.worker.rest().adapters)
    for part, most, least in (("zipf", all_there, few), ("zipf in waves", all_in_waves, few_in_waves)):
        if most is not None and least is not None:
            share = least.tokens_per_s / most.tokens_per_s
            yield {"part": part, "share_of_all_resident": share, "aim": AIM_ZIPF, "num_there": num_there}


def _surviving(part: str, measure: Callable[[], T]) -> Generator[Answer, None, T | None]:
    """Yield what a part finds, and return it; what it raises costs no other."""
    try:
        found = measure()
    except Exception as error:
        traceback.print_exc()
        yield {"part": part, "error": repr(error)}
        return None
    yield {"part": part, **asdict(found)}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    given = parser.parse_args()
    if given.tiny and given.save:
        parser.error("numbers of a tiny run mean nothing: leave out --save")
    scale = TINY if given.tiny else full(given.layers, given.adapters)
    found: list[Answer] = []
    gc.freeze()  # as a worker's process does: to look through all that is imported takes 0.3 s
    with tempfile.TemporaryDirectory(prefix="hearth-lora-", dir=scale.place) as name:
        place = Path(name)
        with step("writing the base and its adapters"):
            library = Library.write(scale, place)
        with keeping(scale.device, library.host_bytes, place) as socket:
            for answer in answers(library, socket):
                found.append(answer)
                print(json.dumps(answer), flush=True)
    if given.save:
        lines = [asdict(row) for row in rows.of_serving(found)]
        result = {"layers": given.layers, "adapters": given.adapters, "rows": lines, "answers": found}
        keep("lora_serving", result)
    if any("error" in answer for answer in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
