"""Which step of a service with adapters takes far too long, and what stood still meanwhile?

python -m bench.lora.pauses [--layers N] [--adapters N] [--tiny]

The requests of `bench.lora.serving`'s `zipf` with room for some of the adapters, once as a worker has them,
with all that is imported frozen for the collector of garbage, and once not. A line of JSON is printed for
every step of more than 50 ms: collections of garbage within it, the longest time in which a thread that only
wakes every millisecond did not get the interpreter, where the other threads were when it did, and what was
loaded and compiled. And a line for all steps of each, with how long one full collection takes then.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from argparse import RawDescriptionHelpFormatter
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType

from bench.lora.library import TINY, Library, full
from bench.lora.serving import AdapterAsk, AdapterClient, asking, zipf_requests
from bench.report import arguments, percentiles, step
from bench.reuse.worker import keeping
from hearth.core.messages import AdapterLoaded, StepDone
from hearth.kernels.compilations import COMPILATIONS

LONG_S, LOOK_S = 0.05, 0.001
NUM_LOOKS = 20_000  #: that are kept, and as many collections
NUM_FRAMES = 3  #: of each thread, the innermost

Answer = dict[str, object]


@dataclass(frozen=True, slots=True)
class Look:
    """Where all other threads were at a moment."""

    at_s: float
    frames: Sequence[str]


@dataclass(slots=True)
class Watcher:
    """Looks at all threads again and again. Mutable; written by its own thread and the collector's."""

    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=NUM_LOOKS))
    #: Begin, end and generation.
    collections: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=NUM_LOOKS))
    _began_s: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        thread = threading.Thread(target=self._look, name="watcher", daemon=True)
        gc.callbacks.append(self._collected)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()
            gc.callbacks.remove(self._collected)

    def _look(self) -> None:
        own = threading.get_ident()
        while not self._ended.wait(LOOK_S):
            names = {one.ident: one.name for one in threading.enumerate()}
            frames = [
                f"{names.get(ident, '?')}: {_where(frame)}"
                for ident, frame in sys._current_frames().items()
                if ident != own
            ]
            self.looks.append(Look(time.perf_counter(), frames))

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
        else:
            self.collections.append((self._began_s, now_s, info["generation"]))

    def seen(self, begin_s: float, end_s: float) -> Answer:
        """Return what was seen from one time to another."""
        # Copied in one go: other threads go on adding.
        looks = [look for look in list(self.looks) if begin_s <= look.at_s <= end_s]
        times = [begin_s, *(look.at_s for look in looks), end_s]
        where = Counter(frame for look in looks for frame in look.frames)
        return {
            "collections": [
                {"generation": generation, "s": ended_s - began_s}
                for began_s, ended_s, generation in list(self.collections)
                if ended_s >= begin_s and began_s <= end_s
            ],
            "longest_without_interpreter_s": max(after - before for before, after in pairwise(times)),
            "num_looks": len(looks),
            "threads": dict(where.most_common(12)),
        }


def _where(frame: FrameType) -> str:
    places: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(places) < NUM_FRAMES:
        places.append(f"{Path(at.f_code.co_filename).name}:{at.f_lineno} {at.f_code.co_name}")
        at = at.f_back
    return " < ".join(places)


def compilations() -> list[int]:
    counts = COMPILATIONS
    return [counts.num_ahead, counts.num_while_serving, counts.num_loads_while_serving]


def watched(part: str, client: AdapterClient, asks: Sequence[AdapterAsk]) -> Iterator[Answer]:
    """Yield every long step, and how long all took."""
    COMPILATIONS.watch()
    with Watcher().watching() as watcher:
        began_s = last_s = time.perf_counter()
        before, num_loads, num_tokens, took_s = compilations(), 0, 0, list[float]()
        for at_s, fact, num_left in client.rolling(asks):
            if isinstance(fact, AdapterLoaded):
                num_loads += 1
            if not isinstance(fact, StepDone):
                continue
            num_tokens += len(fact.runs)
            took_s.append(at_s - last_s)
            now = compilations()
            if at_s - last_s > LONG_S:
                yield {
                    "part": part,
                    "step_s": at_s - last_s,
                    "after_s": last_s - began_s,
                    "rows": len(fact.runs),
                    "admitted": len(fact.admitted),
                    "left": num_left,
                    "loads_so_far": num_loads,
                    "compilations": [after - one for after, one in zip(now, before, strict=True)],
                    **watcher.seen(last_s, at_s),
                }
            before = now
            last_s = at_s
        collections = [
            ended - began for began, ended, generation in list(watcher.collections) if generation == 2
        ]
    yield {
        "part": f"{part}, all steps",
        "tokens_per_s": num_tokens / (last_s - began_s),
        "step_s": percentiles(took_s),
        "num_loads": num_loads,
        "full_collections_s": collections,
        "one_now_s": _collect_s(),
    }


def _collect_s() -> float:
    began_s = time.perf_counter()
    gc.collect()
    return time.perf_counter() - began_s


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=400)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    given = parser.parse_args()
    scale = TINY if given.tiny else full(given.layers, given.adapters)
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="hearth-lora-", dir=scale.place) as name:
        place = Path(name)
        with step("writing the base and its adapters"):
            library = Library.write(scale, place)
        asks = zipf_requests(library)
        with (
            keeping(scale.device, library.host_bytes, place) as socket,
            asking(library, socket, scale.num_room) as client,
        ):
            with step("all adapters to host memory, and steps captured"):
                client.run_all(library.adapters, max_tokens=1)
                client.run(asks[: 3 * scale.batch])
            for part in ("frozen", "not frozen"):
                if part == "not frozen":
                    gc.unfreeze()
                with step(part):
                    for answer in watched(part, client, asks):
                        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
