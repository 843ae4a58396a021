"""`hearth deploy`, `list` and `rm`, through the running service or in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from hearth.cli import local_models
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
    err,
    existing,
    is_place,
    print_columns,
    warn,
)
from hearth.cli.convert import QUANT_HELP, Quant
from hearth.cli.endpoint import running
from hearth.cli.figures import count, duration, size
from hearth.cli.progress import bar
from hearth.cli.tab_completion import ModelNames, complete_base
from hearth.control.deploy.names import has_dependents
from hearth.control.observe.views import ModelView
from hearth.core.errors import ConfigError, ModelError, NameTaken, UnknownModel, Unreached, UnsupportedModel

if TYPE_CHECKING:
    from hearth.control.deploy.deploy import DeployOrder, DeployProgress


@app.command(rich_help_panel="Models")
def deploy(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="hf:ORG/NAME[:GGUF], URL, GGUF file, converted model, Hugging Face or PEFT directory.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model; by default that of SOURCE.")] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(metavar="DTYPE", help=f"{SPELLED_DTYPES}; auto: float32 on a CPU, else as in SOURCE."),
    ] = Dtype.AUTO,
    quant: Annotated[Quant, typer.Option(help=QUANT_HELP)] = Quant.AUTO,
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
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Deploy a model, or a LoRA adapter of a model, under a name.

    Downloads the model if needed, converts it to the format that loads by copying, and registers it. A model
    that is already converted, or is in object storage, is registered where it is. An adapter is served by its
    base; --base is not needed if the adapter names it. What is deployed from the same repository or URL under
    that name stays as it is. A snapshot is made after the first start; `hearth snapshot` makes it before.

    [bold]Examples[/bold]

      hearth deploy ./Qwen2.5-7B-Instruct --name qwen-7b

      hearth deploy hf:HuggingFaceTB/SmolLM2-135M-Instruct

      hearth deploy hf:bartowski/google_gemma-3-1b-it-GGUF:Q4_K_M

      hearth deploy ./llama-3-8b.gguf --quant int8

      hearth deploy s3://models/qwen-7b

      hearth deploy ./my-lora --base qwen-7b --name my-qwen

      hearth deploy hf:Qwen/Qwen2.5-7B-Instruct --label gpu=h200
    """
    from hearth.control.deploy.deploy import DeployOrder  # not for `hearth list`

    client = running(context, url, api_key, data_dir)
    started_s = time.perf_counter()
    with client or nullcontext():
        order = DeployOrder(
            absolute_source(source, is_elsewhere=url is not None),
            name,
            dtype.value,
            quant.value,
            overwrite=overwrite,
            base=base,
            labels=tuple(labels or ()),
        )
        known = None
        try:
            model = carry_out(client, order, data_dir)
        except NameTaken:
            if (known := _deployed_already(client, order, data_dir)) is None:
                raise
            model = known
    if as_json:
        typer.echo(msgspec.json.encode(model))
    elif known is not None:
        typer.echo(f"{model.name} is already deployed from {model.source}; `--overwrite` deploys it again")
    else:
        typer.echo(f"{_summary(model)}, in {time.perf_counter() - started_s:.1f} s")
    if model.warning is not None:
        warn(f"warning: {model.warning}")


def carry_out(client: Client | None, order: DeployOrder, data_dir: Path) -> ModelView:
    """Deploy through a service, None: in this process, and show the progress."""
    events = local_models.deploy(order, data_dir) if client is None else client.deploy(order)
    return follow(order.source, events)


def _summary(model: ModelView) -> str:
    of = "" if model.base is None else f"adapter of {model.base}, rank {model.max_rank}, "
    return f"deployed {model.name}: {of}{size(model.num_bytes)}, {model.dtype}"


def _deployed_already(client: Client | None, order: DeployOrder, data_dir: Path) -> ModelView | None:
    """Return the model of an order that changes nothing. Files at a path may have changed since."""
    from hearth.control.deploy.deploy import DeployOrder
    from hearth.control.deploy.sources import PathSource, default_name, parse_source

    source = parse_source(order.source)
    if isinstance(source, PathSource) or order != DeployOrder(order.source, order.name):
        return None
    wanted = (order.name or default_name(source), source.text)
    return next((one for one in _models(client, data_dir) if (one.name, one.source) == wanted), None)


def find(client: Client | None, name: str, data_dir: Path) -> ModelView:
    return local_models.find(data_dir, name) if client is None else client.model(name)


def deployed(client: Client | None, text: str, data_dir: Path, *, asks: bool) -> ModelView:
    """Return a model by its name or source; one that is not deployed is now, or after a question.

    Raises UnknownModel: there is no such model, or no terminal to ask at.
    """
    from hearth.control.deploy.deploy import DeployOrder  # as above
    from hearth.control.deploy.sources import HubSource, parse_source

    try:
        if not text.startswith("hf:") and not is_place(text):
            return find(client, text, data_dir)
    except UnknownModel:
        if not isinstance(parse_source(text), HubSource):
            raise
    source = absolute_source(text, is_elsewhere=False)
    for view in _models(client, data_dir):
        if view.preset is None and source in (view.source, view.source.partition("@")[0]):
            return view
    if asks:
        _ask_to_deploy(source)
    model = carry_out(client, DeployOrder(source), data_dir)
    err.print(Text(_summary(model), style="dim"))
    return model


def _ask_to_deploy(source: str) -> None:
    if not sys.stdin.isatty():
        raise UnknownModel(f"`{source}` is not deployed; deploy it with `hearth deploy {source}`")
    # Not `typer.confirm`, which would write a space before the answer of the model.
    answer = err.input(Text(f"{source} is not deployed. Deploy it now? [Y/n] "))
    if answer.strip().lower() not in ("", "y", "yes"):
        raise typer.Abort


@app.command("list", rich_help_panel="Models")
def list_models(
    context: typer.Context,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """List the deployed models, adapters and presets.

    Includes models that are not loaded; `hearth ps` shows what is in memory. Adapters and presets are listed
    below their base.

    [bold]Examples[/bold]

      hearth list

      hearth list --json
    """
    client = running(context, url, api_key, data_dir)
    with client or nullcontext():
        views = _models(client, data_dir)
    if as_json:
        typer.echo(msgspec.json.encode(views))
        return
    rows = [
        [
            view.name,
            view.base or "-",
            ",".join(view.aliases) or "-",
            "preset" if view.preset is not None else size(view.num_bytes),
            count(view.num_parameters),
            view.dtype if view.quant == "none" else f"{view.dtype}, {view.quant}",
            f"{duration(time.time() - view.created_at_s)} ago",
            view.source,
        ]
        for view in sorted(views, key=lambda view: (view.base or view.name, view.base or "", view.name))
    ]
    titles = ["NAME", "BASE", "ALIASES", "SIZE", "PARAMETERS", "DTYPE", "DEPLOYED", "SOURCE"]
    has_bases = any(view.base is not None for view in views)
    shown = [at for at, title in enumerate(titles) if has_bases or title != "BASE"]
    print_columns([titles[at] for at in shown], [[row[at] for at in shown] for row in rows])


@app.command(rich_help_panel="Models")
def rm(
    context: typer.Context,
    names: ModelNames,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    with_adapters: Annotated[
        bool, typer.Option("--with-adapters", help="Also remove the adapters and presets of the model.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Remove deployed models, adapters or presets.

    Deletes the files that `hearth deploy` made, not the source. A model with adapters or presets is only
    removed with --with-adapters.

    [bold]Examples[/bold]

      hearth rm qwen-7b --yes

      hearth rm qwen-7b --with-adapters
    """
    client = running(context, url, api_key, data_dir)
    with client or nullcontext():
        if not yes:
            _confirm_removal(client, names, data_dir, with_adapters=with_adapters)
        for name in names:
            known = _models(client, data_dir) if with_adapters else []
            if client is None:
                local_models.remove(data_dir, name, with_adapters=with_adapters)
            else:
                client.remove(name, with_adapters=with_adapters)
            typer.echo(f"removed {', '.join([name, *(view.name for view in known if view.base == name)])}")


def _confirm_removal(
    client: Client | None, names: Sequence[str], data_dir: Path, *, with_adapters: bool
) -> None:
    known = [] if with_adapters else _models(client, data_dir)
    for at, name in enumerate(names):
        with suppress(UnsupportedModel):  # an adapter that does not fit its base
            find(client, name, data_dir)
        dependents = [view for view in known if view.base == name and view.name not in names[:at]]
        if dependents:
            adapters = [view.name for view in dependents if view.is_adapter]
            presets = [view.name for view in dependents if not view.is_adapter]
            raise has_dependents(name, adapters, presets)
    listed = ", ".join(names)
    if not sys.stdin.isatty():
        raise ConfigError(f"cannot ask whether to remove `{listed}`: not a terminal; pass `--yes` to confirm")
    typer.confirm(f"Remove {listed}{' with adapters and presets' if with_adapters else ''}?", abort=True)


def _models(client: Client | None, data_dir: Path) -> list[ModelView]:
    return local_models.views(data_dir) if client is None else client.models()


def absolute_source(source: str, is_elsewhere: bool) -> str:
    """Return a source with an absolute path: the service has another working directory."""
    from hearth.control.deploy.sources import PathSource, parse_source

    parsed = parse_source(source)
    if not isinstance(parsed, PathSource):
        return parsed.text
    if is_elsewhere and not parsed.path.exists():
        return source
    try:
        existing(Path(source).expanduser())
    except ModelError as error:
        raise ModelError(f"{error}; a model of the Hugging Face Hub is `hf:ORG/NAME`") from error
    return parsed.text


def follow(source: str, events: Iterator[DeployProgress | ModelView]) -> ModelView:
    model = None
    name = source if source.startswith("hf:") or "://" in source else Path(source).name
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
