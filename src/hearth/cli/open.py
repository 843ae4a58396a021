"""`hearth open`: the dashboard of a running service, in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser

import typer

from hearth.cli.console import DEFAULT_DATA_DIR, ApiKey, DataDirectory, Url, app
from hearth.cli.endpoint import reached


@app.command("open", rich_help_panel="Service")
def open_dashboard(
    context: typer.Context,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
) -> None:
    """Open the dashboard in a browser, and print its address.

    It shows the memory of every worker, models, requests, decisions and charts, and has a chat. If the
    service has API keys, the page asks for one; it is never part of the address.

    [bold]Examples[/bold]

      hearth open

      hearth open --url http://gpu-box:8000
    """
    with reached(context, url, api_key, data_dir) as client:
        client.health()  # or say that nothing answers there
        typer.echo(f"{client.url}/")
    # Elsewhere it may start a browser for terminals, in which the page does not work.
    if sys.platform == "darwin" or os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"}:
        webbrowser.open(f"{client.url}/")
