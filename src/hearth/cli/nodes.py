"""`hearth nodes`: list, drain and remove the machines of a cluster."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated

import msgspec
import typer

from hearth.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDirectory, Url, app, print_columns
from hearth.cli.endpoint import reached
from hearth.cli.figures import size
from hearth.control.observe.views import NodeView
from hearth.core.errors import ConfigError

NodeName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the node, as `hearth nodes` has it.")]

nodes_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(nodes_app, name="nodes", rich_help_panel="Service")


@nodes_app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """List the machines of the cluster; `local` is the head itself.

    LINKS are measured speeds at which weights have come from other machines. A machine that was away has a
    new id, like gpu-2.1. Machines that load a model at once pass it on to each other: lines below the table
    tell from whom each receives it.

    [bold]Examples[/bold]

      hearth nodes

      hearth nodes drain gpu-2

      hearth nodes rm gpu-2
    """
    if context.invoked_subcommand is not None:
        return
    with reached(context, url, api_key, data_dir) as client:
        found = client.nodes()
    if as_json:
        typer.echo(msgspec.json.encode(found))
        return
    header = ["NAME", "ID", "STATE", "ADDRESS", "DEVICES", "WORKERS", "MEMORY", "HOST MEMORY", "LINKS"]
    print_columns([*header, "LABELS"], [_row(node) for node in found])
    for node in found:
        if node.reason is not None:
            typer.echo(f"\n{node.name}: {node.reason}")
        for model, sources in node.receives.items():
            typer.echo(f"\n{node.name} receives {model} from {', '.join(sources)}")


@nodes_app.command()
def drain(
    context: typer.Context,
    name: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Have the node back.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Place nothing more on a node. Its running requests finish, and its store still serves others.

    [bold]Examples[/bold]

      hearth nodes drain gpu-2

      hearth nodes drain gpu-2 --undo
    """
    with reached(context, url, api_key, data_dir) as client:
        client.drain_node(name, undo=undo)
    typer.echo(f"{name} takes requests again" if undo else f"{name} gets no more requests")


@nodes_app.command()
def rm(
    context: typer.Context,
    name: NodeName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Remove a node from the cluster. Its requests go on elsewhere; it needs a new token to join again.

    [bold]Examples[/bold]

      hearth nodes rm gpu-2 --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"cannot ask whether to remove `{name}`: not a terminal; pass `--yes` to confirm"
            )
        typer.confirm(f"Remove {name} from the cluster?", abort=True)
    with reached(context, url, api_key, data_dir) as client:
        client.remove_node(name)
    typer.echo(f"removed {name} from the cluster")


def _row(node: NodeView) -> list[str]:
    is_down = node.state == "down"
    counted = Counter(node.devices)
    devices = ", ".join(f"{count} x {device}" for device, count in counted.items())
    links = ", ".join(f"{link.source} {link.bytes_per_s / 1e9:.2f} GB/s" for link in node.links)
    return [
        node.name,
        node.node or "-",
        node.state,
        node.host or "-",
        devices or "-",
        "-" if is_down else f"{node.num_ready_workers} of {len(node.devices)}",
        "-" if is_down else size(node.budget_bytes),
        "-" if is_down else f"{size(node.host_used_bytes)} of {size(node.host_bytes)}",
        links or "-",
        ", ".join(f"{key}={value}" for key, value in node.labels.items()) or "-",
    ]
