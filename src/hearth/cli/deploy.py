"""`hearth deploy`, `list` and `rm`, through the running service or in this process."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from hearth.cli import local_models, snapshot
from hearth.cli.client import Client
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    SPELLED_DTYPES,
    ApiKey,
    AsJson,
    DataDirectory,
    Dtype,
    Url,
    app,
    existing,
    print_columns,
    warn,
)
from hearth.cli.convert import Quant
from hearth.cli.endpoint import reached, running
from hearth.cli.figures import count, duration, size
from hearth.cli.progress import bar
from hearth.cli.tab_completion import ModelName, complete_base
from hearth.control.observe.views import ModelView
from hearth.core.errors import ConfigError, ModelError, Unreached

if TYPE_CHECKING:
    from hearth.control.deploy.deploy import DeployProgress

#: A repository of the Hugging Face Hub without `hf:`.
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


@app.command(rich_help_panel="Models")
def deploy(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Hugging Face or PEFT directory, GGUF file, converted model, hf:ORG/NAME, or URL.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model; by default that of SOURCE.")] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(metavar="DTYPE", help=f"{SPELLED_DTYPES}; auto: float32 on a CPU, else as in SOURCE."),
    ] = Dtype.AUTO,
    quant: Annotated[Quant, typer.Option(help="Quantise linear layers to 8 bits.")] = Quant.NONE,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Deploy SOURCE as a LoRA adapter of this model.",
            autocompletion=complete_base,
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Run the model only on machines with this label; may be repeated.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model of that name.")] = False,
    with_snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Also make a snapshot; needs a running service.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Deploy a model, or a LoRA adapter of a model, under a name.

    Downloads the model if needed, converts it to the format that loads by copying, and registers it. A model
    that is already converted, or is in object storage, is registered where it is. An adapter is served by its
    base; --base is not needed if the adapter names it. With --snapshot the first start is fast already;
    otherwise a snapshot is made after the first start (see `hearth snapshot`).

    [bold]Examples[/bold]

      hearth deploy ./Qwen2.5-7B-Instruct --name qwen-7b --snapshot

      hearth deploy hf:HuggingFaceTB/SmolLM2-135M-Instruct

      hearth deploy ./llama-3-8b.gguf --quant int8

      hearth deploy s3://models/qwen-7b

      hearth deploy ./my-lora --base qwen-7b --name my-qwen

      hearth deploy hf:Qwen/Qwen2.5-7B-Instruct --label gpu=h200
    """
    client = running(context, url, api_key, data_dir)
    if with_snapshot and client is None:
        raise ConfigError("`--snapshot` needs a running service; start one with `hearth serve`")
    absolute = _absolute(source, is_elsewhere=url is not None)
    started_s = time.perf_counter()
    if client is None:
        events = local_models.deploy(
            absolute, name, dtype.value, quant.value, overwrite, data_dir, base, labels or ()
        )
        model = follow(source, events)
    else:
        with client:
            events = client.deploy(absolute, name, dtype.value, quant.value, overwrite, base, labels or ())
            model = follow(source, events)
    if as_json:
        typer.echo(msgspec.json.encode(model))
    else:
        took_s = time.perf_counter() - started_s
        of = "" if model.base is None else f"adapter of {model.base}, rank {model.max_rank}, "
        typer.echo(f"deployed {model.name}: {of}{size(model.num_bytes)}, {model.dtype}, in {took_s:.1f} s")
    if model.warning is not None:
        warn(f"warning: {model.warning}")
    if with_snapshot:
        with reached(context, url, api_key, data_dir) as client:
            view = snapshot.made(client, model.name)
        if not as_json:
            typer.echo(snapshot.summary(view))


@app.command("list", rich_help_panel="Models")
def list_models(
    context: typer.Context,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """List the deployed models and adapters.

    Includes models that are not loaded; `hearth ps` shows what is in memory. Adapters are listed below their
    base.

    [bold]Examples[/bold]

      hearth list

      hearth list --json
    """
    client = running(context, url, api_key, data_dir)
    views = local_models.views(data_dir) if client is None else _listed(client)
    if as_json:
        typer.echo(msgspec.json.encode(views))
        return
    rows = [
        [
            view.name,
            view.base or "-",
            ",".join(view.aliases) or "-",
            size(view.num_bytes),
            count(view.num_parameters),
            view.dtype if view.quant == "none" else f"{view.dtype}, {view.quant}",
            f"{duration(time.time() - view.created_at_s)} ago",
            view.source,
        ]
        for view in sorted(views, key=lambda view: (view.base or view.name, view.base or "", view.name))
    ]
    titles = ["NAME", "BASE", "ALIASES", "SIZE", "PARAMETERS", "DTYPE", "DEPLOYED", "SOURCE"]
    has_adapters = any(view.base is not None for view in views)
    shown = [at for at, title in enumerate(titles) if has_adapters or title != "BASE"]
    print_columns([titles[at] for at in shown], [[row[at] for at in shown] for row in rows])


@app.command(rich_help_panel="Models")
def rm(
    context: typer.Context,
    name: ModelName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    with_adapters: Annotated[
        bool, typer.Option("--with-adapters", help="Also remove the adapters of the model.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Remove a deployed model or adapter.

    Deletes the files that `hearth deploy` made, not the source. A model with adapters is only removed with
    --with-adapters.

    [bold]Examples[/bold]

      hearth rm qwen-7b --yes

      hearth rm qwen-7b --with-adapters
    """
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"cannot ask whether to remove `{name}`: not a terminal; pass `--yes` to confirm"
            )
        typer.confirm(f"Remove {name}{' and its adapters' if with_adapters else ''}?", abort=True)
    client = running(context, url, api_key, data_dir)
    known = list[ModelView]()
    if client is None:
        known = local_models.views(data_dir) if with_adapters else known
        local_models.remove(data_dir, name, with_adapters=with_adapters)
    else:
        with client:
            known = client.models() if with_adapters else known
            client.remove(name, with_adapters=with_adapters)
    typer.echo(f"removed {', '.join([name, *(view.name for view in known if view.base == name)])}")


def _listed(client: Client) -> list[ModelView]:
    with client:
        return client.models()


def _absolute(source: str, is_elsewhere: bool) -> str:
    """Return a source with an absolute path: the service has another working directory."""
    if not _is_path(source):
        return source
    path = Path(source).expanduser()
    if path.exists():
        return str(path.absolute())
    if is_elsewhere:
        return source
    try:
        return str(existing(path).absolute())
    except ModelError as error:
        if not _HUB_NAME.fullmatch(source):
            raise
        raise ModelError(f"{error}; for the Hugging Face Hub use `hf:{source}`") from error


def _is_path(source: str) -> bool:
    return not source.startswith("hf:") and "://" not in source


def follow(source: str, events: Iterator[DeployProgress | ModelView]) -> ModelView:
    model = None
    name = Path(source).name if _is_path(source) else source
    with bar(f"deploying {name}", _count_bytes(source)) as advance:
        for event in events:
            if isinstance(event, ModelView):
                model = event
            else:
                advance(event.done_bytes, event.total_bytes or None, f"{event.phase} {name}")
    if model is None:
        raise Unreached(f"`{source}` was not deployed, and no reason was given; see `hearth logs`")
    return model


def _count_bytes(source: str) -> int | None:
    path = Path(source).expanduser()
    files = [file for file in (path.iterdir() if path.is_dir() else (path,)) if file.is_file()]
    return sum(file.stat().st_size for file in files) or None
