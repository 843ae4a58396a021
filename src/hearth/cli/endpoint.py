"""Finds the service that a command talks to, by its data directory or URL."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import typer

from hearth.cli.client import Client
from hearth.cli.console import err, is_flag_given
from hearth.control.datadir import DataDir, ServiceFile, is_held, running_service
from hearth.core.errors import ConfigError, DataDirError, HearthError, Unreached

#: Time for a starting service to announce itself, which it does before its workers are ready.
WAIT_S = 60.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0


def running(context: typer.Context, url: str | None, api_key: str | None, data_dir: Path) -> Client | None:
    """Return the service at `url`, or the one that runs on the data directory; None: there is none.

    Waits for a service that is starting.

    Raises:
        Unreached: the service of the data directory does not answer at its address.
        ConfigError: flags name both a URL and a directory, of different services.
    """
    if url is not None and not is_flag_given(context, "data_dir"):
        return Client(url, api_key)
    found = _announced(data_dir)
    if url is not None:
        _check_same(url, found, data_dir)
    return None if found is None else recognised(found, api_key, data_dir)


def reached(context: typer.Context, url: str | None, api_key: str | None, data_dir: Path) -> Client:
    client = running(context, url, api_key, data_dir)
    if client is None:
        raise Unreached(
            f"no service runs on the data directory `{data_dir}`; start one with `hearth serve --data-dir "
            f"{shlex.quote(str(data_dir))}`, or choose another by `--data-dir` or `--url`"
        )
    return client


def recognised(found: ServiceFile, api_key: str | None, data_dir: Path) -> Client:
    """Check the instance id: an address may mean something else on this machine. Raises Unreached."""
    client = Client(found.url, api_key or DataDir(data_dir).read_admin_token(), is_direct=True)
    try:
        is_same = client.health().instance_id == found.instance_id
        reason = "another service answers there"
    except HearthError as error:
        is_same, reason = False, str(error)
    if not is_same:
        client.close()
        raise Unreached(
            f"the service on `{data_dir}` (process {found.pid}) should be at `{found.url}`, but {reason}; "
            "if it runs on another machine or in a container, pass `--url`"
        )
    return client


def service_flags(context: typer.Context, url: str | None, data_dir: Path) -> str:
    if url is not None:
        return f" --url {shlex.quote(url)}"
    return f" --data-dir {shlex.quote(str(data_dir))}" if is_flag_given(context, "data_dir") else ""


def _check_same(url: str, found: ServiceFile | None, data_dir: Path) -> None:
    if found is None:
        raise ConfigError(
            f"`--url` and `--data-dir` are both given, but no service runs on `{data_dir}`; drop one of them"
        )
    with Client(url, None) as client:
        if client.health().instance_id != found.instance_id:
            raise ConfigError(
                f"`--url` and `--data-dir` are different services: {url}, and {found.url} on `{data_dir}`; "
                "drop one of them"
            )


def _refuse_node(data_dir: Path) -> None:
    path = DataDir(data_dir).cluster_path
    if not (path / "ca.pem").exists() or (path / "ca.key").exists():
        return
    from hearth.node.credentials import Credentials  # loads packages that only a cluster needs

    node = Credentials.open(path)
    assert node is not None, "it has a certificate"
    raise ConfigError(
        f"`{data_dir}` belongs to the node `{node.name}` of a cluster, which takes no commands; run this on "
        f"the head, whose address for nodes is {node.head}, or pass its `--url`"
    )


def _announced(data_dir: Path) -> ServiceFile | None:
    found = running_service(data_dir)
    if found is not None or not is_held(data_dir):
        return found
    _refuse_node(data_dir)
    give_up_s, delay_s = time.monotonic() + WAIT_S, FIRST_DELAY_S
    with err.status(f"waiting for the service on {data_dir}, which is starting or stopping"):
        while found is None and is_held(data_dir):
            if time.monotonic() > give_up_s:
                raise DataDirError(
                    f"a service uses `{data_dir}` but has not announced its address within {WAIT_S:g} s; the "
                    "first start after an update may take minutes: check `hearth logs` and try again, or "
                    "choose another `--data-dir`"
                )
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            found = running_service(data_dir)
    return found
