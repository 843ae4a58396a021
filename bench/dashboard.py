"""What do open dashboards cost the service, and is the page smooth with many models and requests?

python -m bench.dashboard [--save] [--quick]

    cost    processor time of all processes of a service with ten dashboards, less that without, in turns:
            idle, and with a steady rate of short streams of a tiny random decoder; then of the gateway alone,
            and corrected for the processor's speed, which changes by more than dashboards cost
    page    Chromium, drawn by this CPU, with 1,000 models and 10,000 requests that come meanwhile: times
            between frames and tasks that block the page, while lists are scrolled and searched

The cost does not count the dashboards' own reading, which here is a client's and else a browser's. Needs
Debian's package chromium.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TypedDict

import torch
from playwright.sync_api import Page, sync_playwright

from bench.random_model import TINY, write_random
from bench.report import Row, arguments, emit, percentiles, tell
from bench.service.client import Connection, ask, completion, request
from bench.service.process import Service, serving
from bench.service.streams import Prompts, good
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry

AIM_CORES = 0.02
AIM_TASK_MS = 100.0
FRAME_MS = 1000 / 60
FLAGS = ["--device", "cpu", "--workers", "1", "--memory", "1GiB"]
SETTLE_S = 3.0  #: after dashboards were opened: the first message is the longest


@dataclass(frozen=True, slots=True)
class Scale:
    num_dashboards: int = 10
    num_rounds: int = 4
    round_s: float = 20.0
    requests_per_s: float = 10.0
    num_tokens: int = 32
    num_models: int = 1000
    num_requests: int = 10_000
    num_clients: int = 20
    num_scrolls: int = 120


QUICK = Scale(num_rounds=1, round_s=4.0, num_models=50, num_requests=200, num_scrolls=20)


@dataclass(frozen=True, slots=True)
class Round:
    requests_per_s: float
    num_dashboards: int
    cores: dict[str, float]  #: by process
    stream_bytes: int  #: that all dashboards were sent, once they were open


def cost(scale: Scale, service: Service) -> list[Round]:
    rounds = []
    for rate in (0.0, scale.requests_per_s):
        for _ in range(scale.num_rounds):
            for num_dashboards in (0, scale.num_dashboards):
                one = asyncio.run(_round(scale, service, rate, num_dashboards))
                tell(f"cost: {rate:g} requests/s, {num_dashboards} dashboards: {one.cores}")
                rounds.append(one)
    return rounds


async def _round(scale: Scale, service: Service, rate: float, num_dashboards: int) -> Round:
    sizes: list[int] = []
    watchers = [asyncio.create_task(_watch(service.port, sizes)) for _ in range(num_dashboards)]
    prompts, streams = Prompts(vocab_size=512, num_tokens=16), []
    for _ in range(round(rate)):  # the model is loaded before time counts
        good(await ask(service.port, completion("tiny", prompts.take(1)[0], scale.num_tokens)))
    await asyncio.sleep(SETTLE_S)
    sizes.clear()
    before = service.cpu_s()
    if rate:
        for prompt in prompts.take(round(rate * scale.round_s)):
            question = completion("tiny", prompt, scale.num_tokens)
            streams.append(asyncio.create_task(ask(service.port, question)))
            await asyncio.sleep(1.0 / rate)
        for reply in await asyncio.gather(*streams):
            good(reply)
    else:
        await asyncio.sleep(scale.round_s)
    cores = {name: (now_s - before[name]) / scale.round_s for name, now_s in service.cpu_s().items()}
    for watcher in watchers:
        if watcher.done():
            raise RuntimeError("a dashboard's stream has ended")
        watcher.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    return Round(rate, num_dashboards, cores, sum(sizes))


async def _watch(port: int, sizes: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request("GET", "/hearth/events"))
        while data := await reader.read(1 << 16):
            sizes.append(len(data))
    finally:
        writer.close()


class Measured(TypedDict):
    """What the page noted about itself."""

    frames: list[float]  #: milliseconds between two frames
    tasks: list[float]  #: milliseconds of those longer than 50


@dataclass(frozen=True, slots=True)
class Smoothness:
    name: str
    frame_ms: dict[str, float]
    num_long_tasks: int
    longest_task_ms: float


_BEGIN = """() => {
    const noted = (window.noted = { frames: [], tasks: [] });
    const note = (list) => noted.tasks.push(...list.getEntries().map((one) => one.duration));
    noted.observer = new PerformanceObserver(note);
    noted.observer.observe({ type: "longtask" });
    let last = performance.now();
    const frame = (now) => {
        if (window.noted !== noted) return;
        noted.frames.push(now - last);
        last = now;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame((now) => { last = now; requestAnimationFrame(frame); });
}"""
_END = """() => {
    const { frames, tasks, observer } = window.noted;
    tasks.push(...observer.takeRecords().map((one) => one.duration));
    observer.disconnect();
    window.noted = null;
    return { frames, tasks };
}"""
_SCROLL = """async (steps) => {
    const list = document.querySelector(".list");
    for (let step = 0; step < steps; step += 1) {
        list.scrollTop = (step * 997 * 38) % (list.scrollHeight - list.clientHeight);
        await new Promise(requestAnimationFrame);
    }
}"""


@contextmanager
def _noting(page: Page, name: str, found: list[Smoothness]) -> Iterator[None]:
    page.evaluate(_BEGIN)
    yield
    noted: Measured = page.evaluate(_END)
    one = Smoothness(name, percentiles(noted["frames"]), len(noted["tasks"]), max([0.0, *noted["tasks"]]))
    tell(f"page: {one}")
    found.append(one)


def smoothness(scale: Scale, service: Service) -> list[Smoothness]:
    found: list[Smoothness] = []
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(f"{service.url}/#requests")
        page.locator("h1").wait_for()
        asking = threading.Thread(target=lambda: asyncio.run(_ask(scale, service.port)))
        with _noting(page, "requests come", found):
            asking.start()
            while asking.is_alive():
                page.wait_for_timeout(500)
        tell(f"page: shows {page.locator('.toolbar .end').inner_text()} requests")
        _search_and_scroll(page, scale, "requests", "tiny", found)
        page.goto(f"{service.url}/#models")
        page.locator(".row[role=option]").nth(1).wait_for()
        _search_and_scroll(page, scale, "models", "copy-7", found)
        browser.close()
    return found


async def _ask(scale: Scale, port: int) -> None:
    """Send all requests, a token each, over as many connections as there are clients."""
    prompts = Prompts(vocab_size=512, num_tokens=16)

    async def client(num_requests: int) -> None:
        connection = await Connection.open(port)
        for prompt in prompts.take(num_requests):
            good(await connection.ask(completion("tiny", prompt, 1)))
        connection.close()

    each = scale.num_requests // scale.num_clients
    await asyncio.gather(*(client(each) for _ in range(scale.num_clients)))


def _search_and_scroll(page: Page, scale: Scale, name: str, word: str, found: list[Smoothness]) -> None:
    with _noting(page, f"{name}: scroll", found):
        page.evaluate(_SCROLL, scale.num_scrolls)
    with _noting(page, f"{name}: search", found):
        page.get_by_role("searchbox").press_sequentially(word, delay=80)
        page.wait_for_timeout(500)


@contextmanager
def _service(place: Path, num_models: int) -> Iterator[Service]:
    """Run a service with a tiny model and copies of it, by name."""
    source = write_random(place / "tiny", TINY, "float32", 1, torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=place) as fresh:
        data_dir = DataDir.open(Path(fresh) / "data")
        with Registry(data_dir) as registry:
            tiny = carry_out(DeployOrder(str(source), "tiny"), data_dir, lambda *_: None)
            for name in ("tiny", *(f"copy-{number}" for number in range(1, num_models))):
                registry.add(replace(tiny, name=name))
        with serving(data_dir.path, FLAGS) as service:
            yield service


def _added_cores(rounds: Sequence[Round], rate: float) -> list[float]:
    """Return what dashboards add, by pairs of rounds.

    With requests, times are those of a processor at its mean speed: that of a round follows from the worker,
    which always does the same. The gateway alone serves dashboards.
    """
    chosen = [one for one in rounds if one.requests_per_s == rate]
    worker = mean(one.cores["w0"] for one in chosen)
    cores = [
        one.cores["gateway"] * worker / one.cores["w0"] if rate else sum(one.cores.values()) for one in chosen
    ]
    return [after - before for before, after in zip(cores[::2], cores[1::2], strict=True)]


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="few and short, to see that everything runs")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        with _service(Path(place), 1) as service:
            rounds = cost(scale, service)
        with _service(Path(place), scale.num_models) as service:
            smooth = smoothness(scale, service)
    rows = []
    for rate in (0.0, scale.requests_per_s):
        what = f"{rate:g} requests/s of {scale.num_tokens} tokens" if rate else "an idle service"
        measure = f"{scale.num_dashboards} dashboards, {what}"
        value = 100 * mean(_added_cores(rounds, rate))
        rows.append(Row(measure, "% of a core", value, aim=f"at most {100 * AIM_CORES:g}"))
    for one in smooth:
        rows.append(Row(f"{one.name}: frame, p99", "ms", one.frame_ms["p99"], bound=FRAME_MS))
        aim = f"at most {AIM_TASK_MS:g}"
        rows.append(Row(f"{one.name}: longest task", "ms", one.longest_task_ms, aim=aim))
    result = {
        "config": asdict(scale),
        "rows": [asdict(one) for one in rows],
        "added_cores": {
            f"{rate:g} requests/s": _added_cores(rounds, rate) for rate in (0.0, scale.requests_per_s)
        },
        "page": [asdict(one) for one in smooth],
        "rounds": [asdict(one) for one in rounds],
    }
    emit("dashboard", result, save=options.save)


if __name__ == "__main__":
    main()
