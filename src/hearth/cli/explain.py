"""`hearth explain`: where the time of one request went."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.text import Text

from hearth.cli.console import DEFAULT_DATA_DIR, ApiKey, AsJson, DataDirectory, Url, app, out
from hearth.cli.endpoint import reached
from hearth.cli.waterfall import waterfall
from hearth.control.observe.views import Explanation


@app.command(rich_help_panel="Service")
def explain(
    context: typer.Context,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The `id` of an answer, its x-request-id header, which the client may set, or `last`.",
        ),
    ] = "last",
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a request went.

    Shows one bar per phase on a common time axis, then events, which weights were loaded from where, and the
    estimated cost of each worker. The service keeps the last thousand requests. A key sees the requests of
    its own group; monitor and admin keys see all.

    [bold]Examples[/bold]

      hearth explain

      hearth explain chatcmpl-4f1d2c
    """
    with reached(context, url, api_key, data_dir) as client:
        explained = client.explain(request_id)
    if as_json:
        typer.echo(msgspec.json.encode(explained))
    else:
        print_waterfall(explained)


def print_waterfall(explained: Explanation) -> None:
    for line in waterfall(explained, out.width):
        out.print(Text(line), soft_wrap=True)
