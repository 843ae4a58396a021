"""Finds the service that a command talks to. Starts none."""

from __future__ import annotations

import time
from pathlib import Path

from hearth.cli.client import Client
from hearth.cli.console import err
from hearth.control.datadir import ServiceFile, is_held, running_service
from hearth.errors import DataDirError

DEFAULT_URL = "http://127.0.0.1:8000"
#: Time for a service that starts to announce itself, which it does long before its workers are there.
WAIT_S = 60.0
#: The delay between two looks at it; it doubles up to the longest.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 1.0


def running(url: str | None, api_key: str | None, data_dir: Path) -> Client | None:
    """Return the service that was named, or that runs on the data directory; None: there is neither.

    A service that is starting is waited for: it would not know what a command did meanwhile.
    """
    if url is not None:
        return Client(url, api_key)
    found = _announced(data_dir)
    return None if found is None else Client(found.url, api_key or found.admin_token)


def reached(url: str | None, api_key: str | None, data_dir: Path) -> Client:
    """Return the service that runs, or else try where one usually is: for commands that need a service."""
    return running(url, api_key, data_dir) or Client(DEFAULT_URL, api_key)


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
                    "reached; look at its log with `hearth logs`, or choose another `--data-dir`"
                )
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            found = running_service(data_dir)
    return found
