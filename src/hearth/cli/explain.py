"""`hearth explain`: where the time of one request went. Draws nothing: that is `waterfall.py`."""

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
            help="The `id` of an answer, or its x-request-id header, also one that the client has sent.",
        ),
    ],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a request went.

    One bar per phase on a common axis of time, then what happened when, where the model's bytes came from and
    which were there already, and what each worker would have cost. The service keeps the last thousand
    requests. With a key you see those of its own group; with a monitor's or an admin's, all.

    [bold]Example[/bold]

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
