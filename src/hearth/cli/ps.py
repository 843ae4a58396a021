"""`hearth ps`, `stop` and `logs`: what a running service does."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    ApiKey,
    AsJson,
    DataDirectory,
    Url,
    app,
    out,
    print_columns,
)
from hearth.cli.endpoint import reached
from hearth.cli.figures import duration, precise, size
from hearth.cli.pool_bars import keys_of, pool_lines, signs_for
from hearth.cli.tab_completion import ModelName
from hearth.control.datadir import DataDir
from hearth.control.observe.log_rotation import rotated_path
from hearth.control.observe.views import PoolView, ProcessView, ResidentAdapterView, ResidentView, UnloadView
from hearth.core.errors import DataDirError
from hearth.core.log_format import json_line
from hearth.core.types import LOCAL

#: The time between two views of `hearth ps --watch`.
WATCH_S = 2.0
#: Adapters of a model with a line of their own; the others share one.
MAX_ADAPTERS = 8


@app.command(rich_help_panel="Service")
def ps(
    context: typer.Context,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help=f"Show it again every {WATCH_S:g} s, until Ctrl-C.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show workers, their memory and the loaded models.

    The bar is a worker's memory map; the letters below it are the models that own it. A model is busy while
    it answers and warm until its keep_alive expires. Then it is retained: only as much is evicted as other
    models need. A pinned model is never evicted. Busy models that do not fit in memory together take turns;
    TURN says when the next token of a paused model is due. KV BLOCKS are used + cached of all of the model.
    Adapters are listed below their base. Host memory caches models for GPUs; on a CPU it only buffers reads.

    [bold]Examples[/bold]

      hearth ps

      hearth ps --watch
    """
    with reached(context, url, api_key, data_dir) as client:
        while True:
            view = client.ps()
            if as_json:
                typer.echo(msgspec.json.encode(view))
            else:
                if watch:
                    out.clear()
                _print_processes(view)
            if not watch:
                return
            time.sleep(WATCH_S)


@app.command(rich_help_panel="Service")
def stop(
    context: typer.Context,
    name: ModelName,
    free: Annotated[bool, typer.Option("--free", help="Free its memory now, not when needed.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Let a model be evicted before its keep_alive expires.

    Running requests are finished first. Its memory is reused when other models need it, or freed now with
    --free. The next request loads the model again. Its copy in host memory stays until others need the space.

    [bold]Examples[/bold]

      hearth stop qwen-7b

      hearth stop qwen-7b --free
    """
    with reached(context, url, api_key, data_dir) as client:
        unloaded = client.unload(name, free)
    typer.echo(f"{name} {_fate(unloaded)}")


@app.command(rich_help_panel="Service")
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines.")] = False,
    num_lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end.")
    ] = 100,
    access: Annotated[
        bool, typer.Option("--access", help="Print the access log, one line per request.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Print the log of the service on this machine.

    It includes the logs of workers. Prompts and answers are never logged. With --json a line becomes an
    object with time, level, logger, event, fields and text; a line of a traceback has text alone. With the
    setting log.format="json" the service writes these objects itself.

    [bold]Examples[/bold]

      hearth logs -n 20

      hearth logs -f

      hearth logs -f --json | jq 'select(.level == "ERROR")'
    """
    path = DataDir(data_dir).access_log_path if access else DataDir(data_dir).log_path
    if not path.exists():
        raise DataDirError(f"no log at `{path}`; `hearth serve` writes it: pass its `--data-dir`")
    tail = ["tail", "-n", str(num_lines), "-F", str(path)]  # handles rotation
    if follow and not as_json:
        os.execvp("tail", tail)
    for line in _followed(tail) if follow else _last_lines(path, num_lines):
        text = line.removesuffix("\n")
        typer.echo(json_line(text) if as_json else text)


def _followed(tail: list[str]) -> Iterator[str]:
    with subprocess.Popen(tail, stdout=subprocess.PIPE, encoding="utf-8", errors="replace") as process:
        assert process.stdout is not None, "asked for as a pipe"
        yield from process.stdout


def _last_lines(path: Path, num_lines: int) -> Iterator[str]:
    last: deque[str] = deque(maxlen=num_lines)
    for part in (rotated_path(path), path):
        with suppress(FileNotFoundError), part.open(encoding="utf-8", errors="replace") as lines:
            last.extend(lines)
    yield from last


def _fate(view: UnloadView) -> str:
    requests = "1 request" if view.num_requests == 1 else f"{view.num_requests} requests"
    if not view.was_loaded:
        fate = "is not in device memory"
        fate += f" yet: {requests} will load it" if view.num_requests else ""
    else:
        memory = f"{size(view.device_bytes)} of device memory" if view.device_bytes else "its memory"
        fate = f"frees {memory}" if view.free else f"keeps {memory} until it is needed"
        fate = f"finishes {requests}, then it {fate}" if view.num_requests else fate
    if view.host_bytes:
        fate += f"; {size(view.host_bytes)} stay in host memory until it is needed"
    return fate


def _print_processes(view: ProcessView) -> None:
    workers = [
        [
            worker.worker,
            str(worker.pid),
            worker.device,
            worker.state,
            f"{size(worker.used_bytes)} of {size(worker.budget_bytes)}",
            str(worker.num_restarts),
        ]
        for worker in view.workers
    ]
    header = ["WORKER", "PID", "DEVICE", "STATE", "MEMORY", "RESTARTS"]
    if any(worker.node != LOCAL for worker in view.workers):
        header.insert(0, "NODE")
        for row, worker in zip(workers, view.workers, strict=True):
            row.insert(0, worker.node)
    print_columns(header, workers)
    for worker in view.workers:
        if worker.reason is not None:
            typer.echo(f"\n{worker.reason}")
    keys = keys_of(view.models)
    signs = signs_for(out.encoding)
    for worker in view.workers:
        for line in pool_lines(worker, keys, signs, out.width):
            out.print(line, soft_wrap=True)
        if worker.pool is not None and (limit := _torch_limit(worker.pool)) is not None:
            typer.echo(f"  outside the pool: {limit}")
    typer.echo()
    models = []
    for model in view.models:
        models.append(_model_row(model, keys[model.worker, model.model]))
        models += _adapter_rows(model)
    header = ["MODEL", "KEY", "WORKER", "STATE", "WEIGHTS", "SHARED", "KV BLOCKS", "RUNNING", "TURN"]
    print_columns([*header, "TIME LEFT"], models)
    for model in view.models:
        if model.layers is not None:
            begin, end = model.layers
            how = "" if model.transport is None else f", its input by {model.transport}"
            stages = "in stages to have more KV memory" if model.is_dropped else "in stages"
            typer.echo(f"\n{model.model} is {stages}: {model.worker} has layers {begin} to {end - 1}{how}")
        if model.stage_s:
            stages = " + ".join(precise(seconds) for seconds in model.stage_s)
            typer.echo(
                f"  a decode step takes {stages} in its stages and {precise(model.hops_s)} between them, "
                f"{model.num_flights} are in flight"
            )
        if model.kv_demand_tokens > model.kv_room_tokens:
            typer.echo(
                f"\n{model.model} runs out of KV memory on {model.worker}: its requests need "
                f"{model.kv_demand_tokens} tokens within a second, it has room for {model.kv_room_tokens}"
            )
    for model in view.models:
        if model.is_pin_refused:
            typer.echo(f"\n{model.model} cannot be pinned: other models would have no memory for their turns")
    if view.host is not None:
        typer.echo(f"\nhost memory: {size(view.host.used_bytes)} of {size(view.host.budget_bytes)}")
    typer.echo(f"\nrequests: {view.num_running} running, {view.num_waiting} waiting")


def _torch_limit(pool: PoolView) -> str | None:
    if pool.torch_limit_bytes is None:
        return None
    how = "measured" if pool.is_torch_limit_measured else "estimated until its models have snapshots"
    return f"at most {size(pool.torch_limit_bytes)}, {how}"


def _model_row(model: ResidentView, key: str) -> list[str]:
    return [
        model.model,
        key,
        model.worker,
        model.state,
        f"{size(model.loaded_bytes)} of {size(model.total_bytes)}",
        size(model.shared_bytes) if model.shared_bytes else "-",
        _kv(model),
        _running(model),
        _turn(model),
        _left(model),
    ]


def _adapter_rows(model: ResidentView) -> list[list[str]]:
    shown, others = model.adapters[:MAX_ADAPTERS], model.adapters[MAX_ADAPTERS:]
    rows = [
        ["  + " + one.name, "", "", _adapter_state(one), size(one.num_bytes), "", "", str(one.num_running)]
        for one in shown
    ]
    if others:
        num_bytes = sum(one.num_bytes for one in others)
        num_running = sum(one.num_running for one in others)
        rows.append([f"  + {len(others)} more", "", "", "", size(num_bytes), "", "", str(num_running)])
    return [[*row, "", ""] for row in rows]


def _adapter_state(adapter: ResidentAdapterView) -> str:
    if adapter.num_running:
        return "busy"
    if adapter.num_waiting:
        return "waiting"
    return "pinned" if adapter.is_pinned else "retained"


def _running(model: ResidentView) -> str:
    most = "" if model.max_seqs is None else f" of {model.max_seqs}"
    return f"{model.num_running}{most}"


def _kv(model: ResidentView) -> str:
    if not model.kv_blocks:
        return "-"
    return f"{model.kv_used_blocks}+{model.kv_cached_blocks} of {model.kv_blocks}, {size(model.kv_bytes)}"


def _turn(model: ResidentView) -> str:
    if model.due_in_s is None:
        return "-"
    if model.is_in_turn:
        return "now"
    return f"due in {precise(model.due_in_s)}" if model.due_in_s >= 0 else f"{precise(-model.due_in_s)} late"


def _left(model: ResidentView) -> str:
    return "-" if model.expires_in_s is None else duration(model.expires_in_s)
