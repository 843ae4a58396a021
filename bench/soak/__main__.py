"""Does the service stay whole? Twenty models in room for three, cancels, kills and changes, for ten minutes.

python -m bench.soak [--save] [--minutes N] [--seed N] [--per-second N] [--journal FILE]

Each question must end exactly once, with the right answer or an error that the documents name. Checked ones
are greedy; their right answers were found before, undisturbed. Memory, descriptors, threads and tasks must
not grow. At the end nothing may run or wait, the event log must give the same actions again, and nothing may
be left of the service. Exits with 1 if anything of this does not hold.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import uvloop

from bench.random_model import write_random
from bench.report import arguments, emit, keep_journal, tell
from bench.service.client import ask, metrics_of, request
from bench.service.process import Service, deploy, serving
from bench.soak.load import Load, Tally
from bench.soak.setting import CONFIG, NUM_FITTING, NUM_WORKERS, flags
from bench.soak.watch import Watch
from hearth.control.datadir import DataDir
from hearth.control.journal import previous, replay

NUM_MODELS = 20
NUM_VOLATILE = 4  #: models that come and go, the least popular ones
KILL_EVERY_S, CHANGE_EVERY_S, REDEPLOY_EVERY_S, LOOK_EVERY_S = 30.0, 4.0, 45.0, 2.0
IDLE_S = 30.0  #: for everything to come to rest at the end
#: Limit of a journal that is to be kept: it rotates, so that the kept file begins with the state of a fleet.
KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Options:
    minutes: float
    seed: int
    per_s: float  #: questions


@dataclass(frozen=True, slots=True)
class Result:
    figures: Mapping[str, object]
    violations: list[str]


class Trouble:
    """Kills workers and changes models at random moments. Mutable; used on the event loop alone."""

    def __init__(self, service: Service, sources: dict[str, Path], load: Load, seed: int) -> None:
        self._service, self._sources, self._load = service, sources, load
        self._random = random.Random(seed)
        self.watch = Watch()
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Make trouble until this is cancelled."""
        await asyncio.gather(
            self._every(KILL_EVERY_S, self._kill),
            self._every(CHANGE_EVERY_S, self._unload),
            self._every(REDEPLOY_EVERY_S, self._redeploy),
            self._look_on(),
        )

    async def _every(self, mean_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / mean_s))
            await act()

    async def _kill(self) -> None:
        processes = await asyncio.to_thread(self._service.client.ps)
        ready = [worker.pid for worker in processes.workers if worker.state == "ready"]
        if ready:
            os.kill(self._random.choice(ready), signal.SIGKILL)
            self.counts["workers killed"] += 1

    async def _unload(self) -> None:
        name, is_freed = self._random.choice(list(self._sources)), self._random.random() < 0.5
        await self._do("unload", "POST", f"/hearth/models/{name}/unload", {"free": is_freed})

    async def _redeploy(self) -> None:
        """Remove one of the models that are seldom asked for and deploy it again."""
        name = self._random.choice(list(self._sources)[-NUM_VOLATILE:])
        await self._do("remove", "DELETE", f"/hearth/models/{name}")
        await asyncio.sleep(self._random.uniform(0.0, 2.0))
        await self._do("deploy", "POST", "/hearth/models", {"source": str(self._sources[name]), "name": name})

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            pids = await asyncio.to_thread(self._service.pids)
            metrics = await metrics_of(self._service.port)
            self.watch.look(pids, int(metrics["hearth_gateway_tasks"]))

    async def _do(self, what: str, method: str, path: str, body: Mapping[str, object] | None = None) -> None:
        reply = await ask(self._service.port, request(method, path, body))
        self.counts[f"{what}: {reply.status}"] += 1
        # A model that has just been removed cannot be unloaded.
        if reply.status not in (200, 201, 204) and not (what == "unload" and reply.status == 404):
            self._load.tally.violations.append(f"{method} {path}: {reply.status} {reply.body[-300:]!r}")


async def soak(service: Service, sources: dict[str, Path], options: Options) -> Result:
    load = Load(service.port, list(sources), options.per_s, options.seed)
    load.volatile = set(list(sources)[-NUM_VOLATILE:])
    tell("the right answers")
    num_close = await load.learn()
    trouble = Trouble(service, sources, load, options.seed)
    tell(f"{options.minutes:g} minutes")
    began = await metrics_of(service.port)
    troubling = asyncio.create_task(trouble.run())
    await load.run(60 * options.minutes)
    tally = load.tally
    if troubling.done():  # by itself only with an error
        tally.violations.append(f"the service could not be troubled any more: {troubling.exception()!r}")
    troubling.cancel()
    ended = await at_rest(service)
    tally.violations += trouble.watch.leaks()
    tally.violations += books(began, ended, tally, load.volatile)
    figures = {
        "asked": dict(tally.asked),
        "held_back": tally.num_held_back,
        "ended": dict(sorted(tally.ended.items())),
        "trouble": dict(trouble.counts),
        "references": len(load.references),
        "references_too_close": num_close,
        "metrics": ended,
        "first_and_last_quarter": trouble.watch.report(),
    }
    return Result(figures, tally.violations)


async def at_rest(service: Service) -> dict[str, float]:
    """Return the metrics when nothing runs or waits any more, or after the longest that this may take."""
    for _ in range(int(IDLE_S)):
        metrics = await metrics_of(service.port)
        if not metrics["hearth_requests_running"] and not metrics["hearth_requests_waiting"]:
            break
        await asyncio.sleep(1.0)
    return metrics


def books(
    began: Mapping[str, float], ended: Mapping[str, float], tally: Tally, volatile: Collection[str]
) -> list[str]:
    """Compare what the service counted with what was asked of it, but of models that come and go."""
    wrong = [
        f"{name} is {ended[name]:.0f} at the end, must be 0"
        for name in ("hearth_requests_running", "hearth_requests_waiting")
        if ended[name]
    ]
    finished = sum(
        count - began.get(key, 0.0)
        for key, count in ended.items()
        if key.startswith("hearth_requests_total{")
        and key.endswith(('outcome="length"}', 'outcome="stop"}'))
        and not any(f'model="{name}"' in key for name in volatile)
    )
    answered, left = tally.of_lasting["answered"], tally.of_lasting["left"]
    if not answered <= finished <= answered + left:
        wrong.append(
            f"the service finished {finished:.0f} requests, clients have {answered} answers and left {left} "
            "alone"
        )
    return wrong


def leftovers(pids: Mapping[str, int]) -> list[str]:
    """Name processes that outlived their service."""
    alive = {name: pid for name, pid in pids.items() if Path(f"/proc/{pid}").exists()}
    return [f"{name} ({pid}) outlived the service" for name, pid in alive.items()]


def journal_differences(path: Path) -> list[str]:
    found = [replay(file).first_difference for file in (previous(path), path) if file.exists()]
    return [f"the event log does not give the same actions again: {one}" for one in found if one is not None]


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-second", type=float, default=6.0, dest="per_s", help="questions")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep a part, compressed")
    given = parser.parse_args()
    options = Options(given.minutes, given.seed, given.per_s)
    with tempfile.TemporaryDirectory(prefix="hearth-soak-") as place:
        data_dir = Path(place) / "data"
        tell(f"{NUM_MODELS} models")
        sources = {
            f"m{number:02}": write_random(
                Path(place) / f"m{number:02}", CONFIG, "float32", number, torch.device("cpu")
            )
            for number in range(NUM_MODELS)
        }
        deploy_all(data_dir, sources)
        settings = [*flags(DataDir.open(data_dir)), "--keep-alive", "5s"]
        if given.journal is not None:
            settings += ["--set", f"service.journal_bytes={KEPT_BYTES}"]
        with serving(data_dir, settings, num_workers=NUM_WORKERS) as service:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(soak(service, sources, options))
            pids = service.pids()
        journal = DataDir.open(data_dir).journal_path
        violations = [*result.violations, *leftovers(pids), *journal_differences(journal)]
        if given.journal is not None:
            keep_journal(previous(journal), given.journal)
        if service.process.returncode:
            violations.append(f"the service ended with {service.process.returncode}, must be 0")
    setting = {**asdict(options), "models": NUM_MODELS, "workers": NUM_WORKERS, "fitting": NUM_FITTING}
    emit("soak", {"setting": setting, **result.figures, "violations": violations}, save=given.save)
    sys.exit(1 if violations else 0)


def deploy_all(data_dir: Path, sources: Mapping[str, Path]) -> None:
    for name, source in sources.items():
        deploy(data_dir, source, name)


if __name__ == "__main__":
    main()
