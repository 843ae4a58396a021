"""`hearth doctor` and `hearth config`: what this machine offers, which settings apply. Changes neither."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.text import Text

from hearth.cli.console import AsJson, ConfigFile, Settings, app, configured, err, out, print_table
from hearth.config import to_toml


@app.command()
def doctor(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Report what this machine offers, which kernels would run on it and what has to be done without."""
    store = configured(config, settings).store
    with err.status("looking around"):
        from hearth.doctor import examine

        report = examine(store)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    facts = asdict(report)
    del facts["devices"], facts["notes"], facts["store"]
    facts["store"] = f"{report.store.path}, {report.store.free_bytes / 2**30:.1f} GiB free"
    facts["direct reads"] = "yes" if report.store.has_direct_reads else "no"
    for number, device in enumerate(report.devices):
        facts[f"device {number}"] = (
            f"{device.name}, {device.free_bytes / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB free"
        )
    print_table("hearth doctor", facts)
    for note in report.notes:
        out.print(Text(f"note: {note}", style="yellow"))


@app.command("config")
def show_config(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Print the settings that apply.

    They come as TOML that can be saved and edited.

    [bold]Examples[/bold]

      hearth config > hearth.toml

      hearth config --config hearth.toml --set engine.max_seqs=64
    """
    resolved = configured(config, settings)
    typer.echo(json.dumps(asdict(resolved)) if as_json else to_toml(resolved), nl=as_json)
