"""What do requests feel of adapters that come and go? A random Llama-2-7B behind a worker's own step loop.

python -m bench.lora.serving [--save] [--layers N] [--adapters N] [--tiny]

    cold     the first token of an adapter that is in host memory and was never on the device, its base idle,
             over that of one that is there
    steps    a batch of 64 that decodes, beside requests for other adapters that are there, and beside such
             whose adapters have to come: how long the steps take
    zipf     1,000 adapters asked for as Zipf has it (exponent 1), 64 at a time and each at once followed by
             the next, with room for 100 of them: tokens per second over those with room for all

Adapters are of rank 8, of q and v alone: 8.4 MB each, so that 1,000 of them fit into /dev/shm and into host
memory. Each answer is printed as a line of JSON as soon as it is there, and one that fails costs no other.
`--tiny` does the same with a small model on the CPU, to see that everything runs; its numbers mean nothing.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TypeVar

from bench.lora.library import BASE, TINY, Library, full
from bench.report import arguments, keep, percentiles, step
from bench.reuse.worker import WorkerClient, keeping, working_over
from hearth.messages import AdapterLoaded, AdapterOrder, CancelRequest, Fact, Sampling, StartRequest, StepDone

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
    """A batch that is always full."""

    tokens_per_s: float
    loads_per_s: float


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
        sampling = Sampling(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
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

    def rolling(self, adapters: Sequence[AdapterOrder], max_tokens: int) -> Iterator[tuple[float, Fact, int]]:
        """Ask for these, a batch at a time; yield facts with their times and how many are still to come."""
        left = list(reversed(adapters))
        running = {
            self.start(left.pop(), max_tokens) for _ in range(min(self.library.scale.batch, len(left)))
        }
        while running:
            heard = self.worker.until(StepDone, AdapterLoaded)
            if isinstance(heard.fact, StepDone):
                for run in running & heard.fact.finished.keys():
                    running.remove(run)
                    if left:
                        running.add(self.start(left.pop(), max_tokens))
            yield heard.at_s, heard.fact, len(left)

    def run_all(self, adapters: Sequence[AdapterOrder], max_tokens: int) -> None:
        for _ in self.rolling(adapters, max_tokens):
            pass


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
    """Time the tokens of a batch that decodes, alone and beside others that ask for one token each."""
    scale = client.library.scale
    batch, others = there[: scale.batch], there[scale.batch :]
    client.run_all([*batch, *others], max_tokens=1)
    running = [client.start(adapter, max_tokens=scale.max_context // 2) for adapter in batch]
    for run in running:
        client.worker.first_token(run)
    warm = [others[number % len(others)] for number in range(len(away))]
    _intervals(client, running[0], warm[::3])  # so that steps of all these shapes have been captured
    found = [percentiles(_intervals(client, running[0], beside)) for beside in ([], warm, away)]
    client.worker.send(*(CancelRequest(run) for run in running))
    client.worker.rest()
    return StepTimes(*found)


def _intervals(client: AdapterClient, run: int, others: Sequence[AdapterOrder]) -> list[float]:
    """Return the times between tokens of a run while these are asked for, or for as many steps."""
    ends: list[float] = []
    waiting = list(others)
    open_runs: set[int] = set()
    while waiting or open_runs or len(ends) < client.library.scale.num_swaps:
        heard = client.worker.until(StepDone)
        assert isinstance(heard.fact, StepDone)
        open_runs -= heard.fact.finished.keys()
        assert run not in heard.fact.finished, "the batch has ended before all was asked"
        if heard.has_token_of(run):
            ends.append(heard.at_s)
            if waiting and len(ends) % BESIDE_STEPS == 0:
                open_runs.add(client.start(waiting.pop(), max_tokens=1))
    return [after - before for before, after in pairwise(ends)]


def zipf(client: AdapterClient, asked: Sequence[AdapterOrder]) -> Throughput:
    """Tokens per second while the batch is full, the first tenth of the requests left out."""
    scale = client.library.scale
    num_warm, num_tokens, num_loads, began_s, ended_s = len(asked) // 10, 0, 0, 0.0, 0.0
    for at_s, fact, num_left in client.rolling(asked, scale.new_tokens):
        if num_left > len(asked) - scale.batch - num_warm:
            began_s = at_s
        elif num_left:
            num_tokens += len(fact.runs) if isinstance(fact, StepDone) else 0
            num_loads += isinstance(fact, AdapterLoaded)
            ended_s = at_s
    return Throughput(num_tokens / (ended_s - began_s), num_loads / (ended_s - began_s))


def zipf_requests(library: Library) -> list[AdapterOrder]:
    """Return the adapters of the requests, the same for every worker."""
    weights = list(accumulate(1 / rank for rank in range(1, len(library.adapters) + 1)))
    drawn = random.Random(2)
    return drawn.choices(library.adapters, cum_weights=weights, k=library.scale.num_requests)


def answers(library: Library, socket: Path) -> Iterator[Answer]:
    scale, asked = library.scale, zipf_requests(library)
    with step("room for all"), asking(library, socket, scale.num_adapters) as client:
        with step("all adapters to host memory and to the device"):
            client.run_all(library.adapters, max_tokens=1)
            client.run_all(library.adapters[-2 * scale.batch :], max_tokens=8)
        resident = yield from _surviving("zipf, room for all", lambda: zipf(client, asked))
    with step(f"room for {scale.num_room}"), asking(library, socket, scale.num_room) as client:
        there, away = library.adapters[: scale.num_room], library.adapters[scale.num_room :]
        with step("warming up"):
            client.run_all(there[: scale.batch], max_tokens=4)
            for adapter in there[:3]:
                client.first_token_s(adapter)
        yield from _surviving("cold", lambda: cold(client, away[: scale.num_cold]))
        yield from _surviving("steps", lambda: steps(client, there, away[-scale.num_swaps :]))
        client.run_all(asked[: 2 * scale.batch], scale.new_tokens)
        few = yield from _surviving(f"zipf, room for {scale.num_room}", lambda: zipf(client, asked))
        num_there = sum(use.num_bytes > 0 for use in client.worker.rest().adapters)
    if resident is not None and few is not None:
        share = few.tokens_per_s / resident.tokens_per_s
        yield {"part": "zipf", "share_of_all_resident": share, "aim": AIM_ZIPF, "num_there": num_there}


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
    with tempfile.TemporaryDirectory(prefix="hearth-lora-", dir=scale.place) as name:
        place = Path(name)
        with step("writing the base and its adapters"):
            library = Library.write(scale, place)
        with keeping(scale.device, library.host_bytes, place) as socket:
            for answer in answers(library, socket):
                found.append(answer)
                print(json.dumps(answer), flush=True)
    if given.save:
        keep("lora_serving", {"layers": given.layers, "adapters": given.adapters, "answers": found})
    if any("error" in answer for answer in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
