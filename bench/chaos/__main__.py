"""Does the service keep its word while everything happens at once? Ten minutes of faults and attackers.

python -m bench.chaos [--save] [--minutes N] [--seed N] [--per-second N] [--only NAME ...]
                      [--without NAME ...] [--journal FILE] [--cluster]

Processes are killed and stopped, writes fail, an object store is slow or lies, and hostile clients attack,
while honest ones ask models that take turns and compare every token with what was answered undisturbed. Each
request must end exactly once, with the right answer or an error that says why. Half of the time there are no
attackers, with the same faults: what honest clients feel of them is the difference. After the first two
minutes memory, descriptors, threads and tasks must not grow, events must replay, and of a killed gateway
nothing may be left.

With --cluster two nodes join the service, which then has one worker of its own. Nodes, too, are killed,
stopped, drained and cut off, and their links fall silent or become slow. After each window all of them must
serve again.

Exits with 1 if any of this does not hold. How much slower honest clients are is told, not judged.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.chaos.attackers import ATTACKERS, SERVED, UNDER_WAY
from bench.chaos.clients import HonestClients, learn, violations
from bench.chaos.faults import FAULTS, NODE_FAULTS, Scene
from bench.chaos.flatness import Flatness, growth
from bench.chaos.nodes import NAMES
from bench.chaos.object_store import serving_models
from bench.chaos.report import Span, as_json, compared, endings, errors, rows
from bench.chaos.schedule import Window, windows
from bench.chaos.service import (
    CALLING_MODEL,
    FAR_MODELS,
    LOCAL_MODELS,
    Keys,
    Models,
    ServiceUnderTest,
    running,
)
from bench.report import arguments, emit, keep_journal, tell
from bench.service.process import ROOT
from bench.soak.setting import NUM_FITTING, NUM_WORKERS

LOOK_EVERY_S, NUM_LOOKS = 0.5, 4  #: after each window
SHOW_EVERY_S = 0.5
MODELS = (*LOCAL_MODELS, *FAR_MODELS)  #: that honest clients ask


@dataclass(frozen=True, slots=True)
class Options:
    minutes: float
    seed: int
    per_s: float  #: questions of honest clients
    faults: list[str]
    attackers: list[str]


@dataclass(slots=True)
class Run:
    """One run: its parts, and what they have seen. Mutable; used on the event loop alone."""

    options: Options
    service: ServiceUnderTest
    keys: Keys
    scene: Scene
    clients: HonestClients
    flatness: Flatness = field(default_factory=Flatness)
    attacks: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)

    async def through(self, window: Window) -> None:
        """Go through a window: faults strike when it is time, beside attackers or not."""
        began_s = time.perf_counter()
        asking = asyncio.create_task(self.clients.run(self.options.per_s))
        attacking = asyncio.create_task(self._attack(window)) if window.has_attackers else None
        striking = []
        for strike in window.strikes:
            await _sleep_until(began_s + strike.after_s)
            striking.append(asyncio.create_task(self.scene.strike(strike)))
        await _sleep_until(began_s + window.seconds)
        self.spans.append(Span(window.has_attackers, began_s, time.perf_counter()))
        if asking.done():  # by itself only with an error
            asking.result()
        asking.cancel()
        if attacking is not None:
            await attacking
        await asyncio.gather(*striking)
        await self.clients.wait_ended()
        if self.service.nodes is not None:
            await self.scene.wait_nodes(NAMES)

    async def look(self) -> None:
        """Look at all processes while nobody asks, after the window that has just ended."""
        for _ in range(NUM_LOOKS):
            await asyncio.sleep(LOOK_EVERY_S)
            num_tasks = await self.service.num_tasks()
            self.flatness.look(len(self.spans) - 1, self.service.processes(), num_tasks)

    async def _attack(self, window: Window) -> None:
        """Have attackers attack for as long as a window lasts."""
        if not self.options.attackers:
            await asyncio.sleep(window.seconds)
            return
        flags = {
            "--port": str(self.service.port),
            "--key": self.keys.hostile,
            "--model": LOCAL_MODELS[0],
            "--calling-model": CALLING_MODEL,
            "--seed": str(self.options.seed),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.chaos.attackers"),
            *(part for flag in flags.items() for part in flag),
            *("--only", *self.options.attackers),
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
        )
        await asyncio.sleep(window.seconds)
        told, _ = await process.communicate(b"")
        if process.returncode:
            raise RuntimeError(f"the attackers ended with {process.returncode}")
        self.attacks.update(json.loads(told))


async def chaos(service: ServiceUnderTest, keys: Keys, scene: Scene, options: Options) -> Run:
    """Learn the right answers, and go through all windows."""
    tell("the right answers")
    references = await learn(service.port, keys.honest, MODELS, options.seed)
    clients = HonestClients(service.port, keys.honest, references, options.seed, service.was_absent)
    run = Run(options, service, keys, scene, clients)
    planned = windows(options.minutes, options.seed, options.faults)
    with progress(run, sum(window.seconds for window in planned)):
        try:
            for window in planned:
                await run.through(window)
                await run.look()
        except (OSError, KeyError) as error:  # a gateway that ended by itself answers nothing
            scene.violations.append(f"the run broke off: {error!r}")
    return run


@contextmanager
def progress(run: Run, seconds: float) -> Iterator[None]:
    """Show a bar on standard error, if that is a terminal, with what became of requests so far."""
    console = Console(stderr=True)
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=seconds)
        began_s = time.perf_counter()

        async def move() -> None:
            while True:
                await asyncio.sleep(SHOW_EVERY_S)
                counts = ", ".join(f"{name} {count}" for name, count in endings(run.clients.asked).items())
                bar.update(task, completed=time.perf_counter() - began_s, description=counts)

        moving = asyncio.create_task(move())
        try:
            yield
        finally:
            moving.cancel()


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


def main() -> None:
    given = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the service ends, too
    known = [*FAULTS, *(NODE_FAULTS if given.cluster else ())]
    names = [name for name in given.only or [*known, *ATTACKERS] if name not in given.without]
    options = Options(
        *(given.minutes, given.seed, given.per_s),
        faults=[name for name in names if name in known],
        attackers=[name for name in names if name in ATTACKERS],
    )
    with tempfile.TemporaryDirectory(prefix="hearth-chaos-") as folder:
        place = Path(folder)
        tell("models and a service")
        models = Models.write(place)
        with serving_models(models.far) as store:
            with running(place, models, store.url, is_cluster=given.cluster) as (service, keys):
                scene = Scene(service, store, models)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    run = runner.run(chaos(service, keys, scene, options))
            tell("the events of every life")
            differences = list(service.journal_differences())
            if given.journal is not None:
                keep_journal(max(service.journals(), key=lambda path: path.stat().st_size), given.journal)
    workers = {"workers": 1, "nodes": len(NAMES)} if given.cluster else {"workers": NUM_WORKERS}
    setting = {**asdict(options), **workers, "fitting": NUM_FITTING, "models": len(MODELS)}
    found = figures(run)
    wrong = [*broken_promises(run), *differences]
    name = "chaos_cluster" if given.cluster else "chaos"
    emit(name, {"setting": setting, **found, "violations": wrong}, save=given.save)
    sys.exit(1 if wrong else 0)


def figures(run: Run) -> dict[str, object]:
    """Return all that a run has seen."""
    asked, ended = run.clients.asked, endings(run.clients.asked)
    found = compared(asked, run.clients.probes, run.scene.struck, run.spans)
    return {
        "ended": ended,
        "held_back": run.clients.num_held_back,
        "errors": errors(asked),
        "faults": dict(sorted(run.scene.counts.items())),
        "attacks": dict(sorted(run.attacks.items())),
        "honest_clients_s": as_json(found),
        "flatness": [asdict(change) for change in run.flatness.changes()],
        "rows": [asdict(row) for row in rows(ended, found)],
    }


def broken_promises(run: Run) -> list[str]:
    """Return all that must not be, but was."""
    grown = growth(run.flatness.changes())
    asked = violations(run.clients.asked, run.clients.probes)
    served = {name for name in SERVED for how in ("200", UNDER_WAY) if run.attacks[f"{name}: {how}"]}
    idle = [
        f"{name} was never served, so it attacked nothing"
        for name in SERVED
        if name in run.options.attackers and name not in served
    ]
    return [*asked, *idle, *run.scene.violations, *run.service.violations, *grown]


def parsed() -> Namespace:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="one seed, one schedule of faults")
    parser.add_argument("--per-second", type=float, default=4.0, dest="per_s", help="honest questions")
    names = [*FAULTS, *NODE_FAULTS, *ATTACKERS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--without", nargs="+", choices=names, metavar="NAME", default=[])
    parser.add_argument("--cluster", action="store_true", help="with two nodes, and their faults")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="keep that of the longest life, compressed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
