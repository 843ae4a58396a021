"""Finds the service that a command talks to: that of its data directory, or that at a URL. Starts none."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import typer

from hearth.cli.client import Client
from hearth.cli.console import err, is_flag_given
from hearth.control.datadir import DataDir, ServiceFile, is_held, running_service
from hearth.core.errors import ConfigError, DataDirError, HearthError, Unreached

#: Time for a service that starts to announce itself, which it does long before its workers are there.
WAIT_S = 60.0
#: The delay between two looks at it; it doubles up to the longest.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0


def running(context: typer.Context, url: str | None, api_key: str | None, data_dir: Path) -> Client | None:
    """Return the service that was named, or that runs on the data directory; None: there is neither.

    A service that is starting is waited for: it would not know what a command did meanwhile.

    Raises:
        Unreached: whoever answers where the service of the directory should be is another one, or nobody.
        ConfigError: flags name both a URL and a directory, and these are two services.
    """
    if url is not None and not is_flag_given(context, "data_dir"):
        return Client(url, api_key)
    found = _announced(data_dir)
    if url is not None:
        _check_same(url, found, data_dir)
    return None if found is None else recognised(found, api_key, data_dir)


def reached(context: typer.Context, url: str | None, api_key: str | None, data_dir: Path) -> Client:
    """Return the service like `running`, for commands that cannot do without.

    Raises:
        Unreached: there is none.
    """
    client = running(context, url, api_key, data_dir)
    if client is None:
        raise Unreached(
            f"no service runs on the data directory `{data_dir}`; start one with `hearth serve --data-dir "
            f"{shlex.quote(str(data_dir))}`, or name that of another by `--data-dir` or `--url`"
        )
    return client


def recognised(found: ServiceFile, api_key: str | None, data_dir: Path) -> Client:
    """Return the service of a directory, after asking whoever answers at its address whether it is that.

    The address is one of the machine or container on which the service runs, which may be another.

    Raises:
        Unreached: another service answers there, or none.
    """
    client = Client(found.url, api_key or DataDir(data_dir).read_admin_token(), is_direct=True)
    try:
        is_same = client.health().instance_id == found.instance_id
        reason = "another service answers there"
    except HearthError as error:
        is_same, reason = False, str(error)
    if not is_same:
        client.close()
        raise Unreached(
            f"the service on `{data_dir}`, process {found.pid}, says that it is at `{found.url}`, but "
            f"{reason}; where it runs on another machine or in a container, name it by `--url`"
        )
    return client


def service_flags(context: typer.Context, url: str | None, data_dir: Path) -> str:
    """Return the flags that lead another command to the same service, each after a space; often none."""
    if url is not None:
        return f" --url {shlex.quote(url)}"
    return f" --data-dir {shlex.quote(str(data_dir))}" if is_flag_given(context, "data_dir") else ""


def _check_same(url: str, found: ServiceFile | None, data_dir: Path) -> None:
    """Raise ConfigError if a URL and a directory were given that do not mean the same service."""
    if found is None:
        raise ConfigError(
            f"`--url` and `--data-dir` are both given, and no service runs on `{data_dir}`; leave one out"
        )
    with Client(url, None) as client:
        if client.health().instance_id != found.instance_id:
            raise ConfigError(
                f"`--url` and `--data-dir` name two services: {url}, and that of `{data_dir}` at "
                f"{found.url}; leave one out"
            )


def _announced(data_dir: Path) -> ServiceFile | None:
    found = running_service(data_dir)
    if found is not None or not is_held(data_dir):
        return found
    give_up_s, delay_s = time.monotonic() + WAIT_S, FIRST_DELAY_S
    with err.status(f"waiting for the service on {data_dir}, which is starting or ending"):
        while found is None and is_held(data_dir):
            if time.monotonic() > give_up_s:
                raise DataDirError(
                    f"a service holds `{data_dir}` and has not told within {WAIT_S:g} s where it can be "
                    "reached; its first start after an update may take minutes: look at its log with "
                    "`hearth logs` and try again, or choose another `--data-dir`"
                )
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            found = running_service(data_dir)
    return found
