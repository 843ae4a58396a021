"""`hearth cluster` and `hearth join`: make a cluster, invite machines, and join one."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    AsJson,
    ConfigFile,
    DataDirectory,
    Device,
    Settings,
    app,
    configured,
    data_dir_of,
    err,
    log_to_terminal,
    print_columns,
    warn,
)
from hearth.cli.figures import duration
from hearth.control.datadir import DataDir, is_held
from hearth.core.config import ClusterConfig, parse_address, parse_duration
from hearth.core.errors import ConfigError
from hearth.node.credentials import Authority, Credentials, keep_head, node_name
from hearth.node.join import join as join_cluster
from hearth.node.join import renew_if_due

TOKEN_LIFE = "24h"
TokenLife = Annotated[
    str, typer.Option("--ttl", metavar="TIME", help="How long nodes can join with it, at most 30d.")
]

cluster_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(
    cluster_app, name="cluster", help="Make this machine the head of a cluster.", rich_help_panel="Service"
)


@cluster_app.command()
def init(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Address at which other machines reach this one; by default that of its default route.",
        ),
    ] = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Make this machine the head of a new cluster, and print the command that adds a machine.

    Creates a certificate authority in the data directory. From its next start, `hearth serve` also listens
    for other machines, on the address `cluster.listen`: 0.0.0.0:7610 by default. Machines authenticate each
    other by certificates of this authority. Keep the directory `cluster` as secret as keys.json.

    [bold]Examples[/bold]

      hearth cluster init

      hearth cluster init --address 10.0.0.1:7610
    """
    applied = configured(config, settings, {"cluster.address": address})
    opened = DataDir.open(data_dir_of(context, data_dir, applied))
    own_address = _own_address(applied.cluster)
    authority = Authority.create(opened.cluster_path, own_address)
    _invite(authority, own_address, TOKEN_LIFE)
    port, listen = own_address.rpartition(":")[2], applied.cluster.listen
    if port != listen.rpartition(":")[2]:
        warn(f"`hearth serve` listens on {listen}: set `cluster.listen`, or forward port {port} there")
    if is_held(opened.path):
        warn("restart `hearth serve`: the running service does not listen for other machines yet")


@cluster_app.command()
def token(ttl: TokenLife = TOKEN_LIFE, data_dir: DataDirectory = DEFAULT_DATA_DIR) -> None:
    """Make a token, and print the command with which machines join.

    A token admits any number of machines until it expires. It is shown only once. Machines that have joined
    need no token any more.

    [bold]Examples[/bold]

      hearth cluster token

      hearth cluster token --ttl 1h
    """
    path = DataDir.open(data_dir).cluster_path
    authority, head = Authority.open(path), Credentials.open(path)
    assert head is not None, "made with the authority"
    _invite(authority, head.head, ttl)


@cluster_app.command()
def tokens(data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False) -> None:
    """List the valid tokens by their ids, without their secrets."""
    valid = Authority.open(DataDir.open(data_dir).cluster_path).tokens()
    if as_json:
        typer.echo(msgspec.json.encode(valid))
        return
    print_columns(["ID", "EXPIRES"], [[one.token_id, f"in {duration(one.expires_in_s)}"] for one in valid])


@cluster_app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token.")],
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Revoke a token. Machines that have joined with it stay; `hearth nodes rm` removes one."""
    Authority.open(DataDir.open(data_dir).cluster_path).revoke_token(token_id)
    typer.echo(f"revoked the token {token_id}")


@app.command(rich_help_panel="Service")
def join(
    context: typer.Context,
    address: Annotated[
        str | None, typer.Argument(metavar="HEAD:PORT", help="Address of the head; only to join or to move.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="TOKEN", help="Token of `hearth cluster token`; -: standard input."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of this machine; by default its host name.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; by default one per GPU.")] = None,
    device: Annotated[Device | None, typer.Option(help="auto: GPUs if there are any.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory per worker, like 8GiB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that caches models for GPUs.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Label of this machine; may be repeated."),
    ] = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Add this machine to a cluster, until Ctrl-C or SIGTERM.

    Run `hearth cluster token` on the head for the command with address and token. The machine keeps its
    certificate: later, as after a reboot, `hearth join` needs neither.
    Labels and sizes have to be given again.

    [bold]Examples[/bold]

      hearth join 10.0.0.1:7610 --token TOKEN

      hearth join 10.0.0.1:7610 --token TOKEN --name gpu-2 --label zone=a

      hearth join
    """
    flags = {
        "cluster.name": name,
        "service.workers": workers,
        "service.device": None if device is None else device.value,
        "service.memory_bytes": memory,
        "store.host_bytes": host_memory,
        "cluster.labels": labels,
    }
    applied = configured(config, settings, flags)
    log_to_terminal(applied)
    opened = DataDir.open(data_dir_of(context, data_dir, applied))
    secret = sys.stdin.read() if token == "-" else token
    credentials = asyncio.run(_credentials(opened.cluster_path, address, secret, applied.cluster.name))
    from hearth.cli.node_server import run_node

    run_node(applied, opened.path, credentials, template=context.obj)


async def _credentials(path: Path, address: str | None, token: str | None, name: str | None) -> Credentials:
    """Return the credentials of this machine: those that it has, or new ones by the token."""
    known = Credentials.open(path)
    if address is not None and token is not None:
        host = node_name(socket.gethostname().partition(".")[0])
        chosen = name or (host if known is None else known.name)
        joined = await join_cluster(address, token, chosen, path)
        err.print(Text(f"joined the cluster of {address} as {joined.name}", style="dim"))
        return joined
    if known is None or token is not None:
        raise ConfigError(
            "to join a cluster, give the address of its head and a token: run `hearth cluster token` on the "
            "head and the command that it prints here"
        )
    if (path / "ca.key").exists():
        raise ConfigError("this machine is the head of its cluster: `hearth serve` uses its devices")
    if name not in (None, known.name):
        raise ConfigError(f"this machine is `{known.name}` in its cluster; another name needs a token")
    if address is not None:
        keep_head(path, address)
        return await _credentials(path, None, None, name)
    return await renew_if_due(known)


def _invite(authority: Authority, head: str, ttl: str) -> None:
    ttl_s = parse_duration(ttl)
    token = authority.new_token(ttl_s)
    told = f"run this within {duration(ttl_s)} on each machine to add:"
    err.print(Text(told, style="dim"), soft_wrap=True)
    typer.echo(f"hearth join {head} --token {token}")


def _own_address(cluster: ClusterConfig) -> str:
    """Return the setting, or the address of the interface that has the default route."""
    if cluster.address is not None:
        return cluster.address
    _, port = parse_address(cluster.listen)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the address is reserved for documentation
            return f"{probe.getsockname()[0]}:{port}"
        except OSError:
            raise ConfigError(
                "no default route tells the address of this machine; give it by `--address HOST:PORT`"
            ) from None
