"""`hearth convert`, `verify` and `show`: models as files."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

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
    named,
    print_table,
    refuse_url,
    url_of,
)
from hearth.cli.endpoint import running
from hearth.cli.figures import duration
from hearth.cli.local_models import find
from hearth.cli.progress import bar
from hearth.cli.tab_completion import complete_model
from hearth.core.errors import ConfigError, UnknownModel

if TYPE_CHECKING:
    from hearth.control.observe.views import ModelView, UpstreamView
    from hearth.store.format.adapter_manifest import AdapterManifest
    from hearth.store.format.manifest import StoredManifest
    from hearth.store.format.writer import OnProgress, Progress


class Quant(StrEnum):
    AUTO = "auto"
    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


QUANT_HELP = (
    "Quantise linear layers to 8 or 4 bits; none: dequantise those that are; auto: keep them as they are."
)


NameOrPath = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of a deployed model, or a directory or GGUF file.",
        autocompletion=complete_model,
    ),
]
ConvertedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a converted model, or name of a deployed one.",
        autocompletion=complete_model,
    ),
]
SourcePath = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="Hugging Face directory or GGUF file.", callback=existing)
]


def _local(dest: Path) -> Path:
    if url := url_of(dest):
        raise ConfigError(
            f"`{url}` is a URL, but this command writes local models; convert to a directory and upload it"
        )
    return dest


DestPath = Annotated[Path, typer.Argument(metavar="DEST", help="Directory to write.", callback=_local)]


@app.command(rich_help_panel="Models")
def convert(
    source: SourcePath,
    dest: DestPath,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help=f"{SPELLED_DTYPES}; auto: as in SOURCE, bfloat16 for quantised GGUF.",
        ),
    ] = Dtype.AUTO,
    quant: Annotated[Quant, typer.Option(help=QUANT_HELP)] = Quant.AUTO,
    base: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Convert SOURCE as a LoRA adapter of this model."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model or LoRA adapter to the format that is served.

    DEST appears only when it is complete, even if the command is killed.

    [bold]Examples[/bold]

      hearth convert ./Qwen2.5-7B-Instruct ./models/qwen-7b

      hearth convert ./Qwen2.5-7B-Instruct ./models/qwen-7b-int8 --quant int8

      hearth convert ./smollm2.Q8_0.gguf ./models/smollm2 --dtype bfloat16

      hearth convert ./my-lora ./models/my-lora --base ./models/qwen-7b
    """
    before = _version(dest)
    try:
        with bar(f"converting {source.name}") as advance:
            from hearth.store.format.convert import convert as convert_model

            def tell(progress: Progress) -> None:
                advance(progress.done_bytes, progress.total_bytes)

            started_s = time.perf_counter()
            manifest: StoredManifest
            if base is not None:
                manifest = _convert_adapter(source, dest, existing(base), dtype, quant, force, tell)
            else:
                manifest = convert_model(
                    source,
                    dest,
                    dtype=dtype.value,
                    quant=quant.value,
                    overwrite=force,
                    on_progress=tell,
                )
    except KeyboardInterrupt:
        outcome = "nothing was written to" if _version(dest) == before else "but the model was written to"
        err.print(Text(f"hearth: interrupted, {outcome} `{dest}`", style="red"))
        raise typer.Exit(130) from None
    total_s = time.perf_counter() - started_s
    if as_json:
        typer.echo(json.dumps({"path": str(dest), "total_s": total_s, **_stored_facts(manifest)}))
    else:
        typer.echo(f"wrote {dest}: {_throughput(manifest, total_s)}")


def _convert_adapter(
    source: Path, dest: Path, base: Path, dtype: Dtype, quant: Quant, force: bool, on_progress: OnProgress
) -> AdapterManifest:
    from hearth.store.format.convert_adapter import convert_adapter, read_base
    from hearth.store.format.peft import open_peft

    if quant not in (Quant.AUTO, Quant.NONE):
        raise ConfigError(f"adapters cannot be quantised, even if their base is; given: --quant {quant}")
    known = read_base(base)
    if dtype is not Dtype.AUTO:
        known = replace(known, dtype=dtype.value)
    return convert_adapter(open_peft(source), dest, known, overwrite=force, on_progress=on_progress)


@app.command(rich_help_panel="Models")
def verify(
    model: ConvertedModel, data_dir: DataDirectory = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """Verify a converted model against its hashes.

    The exit code is 1 if any byte has changed.

    [bold]Examples[/bold]

      hearth verify ./models/qwen-7b

      hearth verify smollm2
    """
    path = _place_of(model, data_dir)
    with bar(f"verifying {path.name}") as advance:
        from hearth.store.format.description import read_description
        from hearth.store.format.verify import BadChunk
        from hearth.store.format.verify import verify as verify_model

        started_s = time.perf_counter()
        manifest = read_description(path)
        bad = verify_model(
            path, lambda progress: advance(progress.done_bytes, progress.total_bytes), manifest
        )
    total_s = time.perf_counter() - started_s
    if as_json:
        typer.echo(
            json.dumps({"is_whole": not bad, "total_s": total_s, "bad": [asdict(part) for part in bad]})
        )
    elif not bad:
        typer.echo(f"{path} is intact: {_throughput(manifest, total_s)}")
    else:
        for part in bad:
            if isinstance(part, BadChunk):
                typer.echo(f"chunk {part.index}: {part.reason}; tensors in it: {', '.join(part.tensors)}")
            else:
                typer.echo(f"{part.name}: {part.reason}")
        typer.echo(f"{path} is damaged: convert the model again")
    if bad:
        raise typer.Exit(1)


def _place_of(model: str, data_dir: Path) -> Path:
    path = Path(model)
    if not path.exists() and not is_place(model):
        with suppress(UnknownModel):
            path = Path(find(data_dir, model).where)
    return existing(path)


@app.command(rich_help_panel="Models")
def show(
    context: typer.Context,
    model: NameOrPath,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show the architecture, size and settings of a model.

    Weights are not loaded. A model from a URL or the Hub stays at the version that was deployed; `upstream`
    says whether there is a newer one.

    [bold]Examples[/bold]

      hearth show smollm2

      hearth show ./Qwen2.5-0.5B-Instruct

      hearth show ./models/qwen-7b --json
    """
    if is_place(model):
        refuse_url(url, model)
        _show_place(existing(Path(model)), as_json)
        return
    client = running(context, url, api_key, data_dir)
    with named(model):
        if client is None:
            view = find(data_dir, model, look=True)
        else:
            with client:
                view = client.model(model, look=True)
    if as_json:
        typer.echo(msgspec.json.encode(view))
    else:
        _print_view(view)


def _print_view(view: ModelView) -> None:
    facts: dict[str, object] = asdict(view)
    if (preset := view.preset) is not None:
        texts = {"system": preset.system, "template": preset.template}
        facts |= {name: text for name, text in texts.items() if text is not None} | preset.sampling
    del facts["preset"], facts["created_at_s"], facts["keep_alive_s"], facts["upstream"]
    facts |= {"aliases": list(view.aliases), "labels": list(view.labels)}
    facts["stages"] = (
        f"{len(view.stages)}, of {' + '.join(map(str, view.stages))} layers" if view.stages else ""
    )
    for key in ("labels", "min_replicas", "max_replicas", "stages", "warning"):
        if not facts[key]:
            del facts[key]
    if view.base is None:
        del facts["base"]
    if view.is_adapter:
        facts["targets"] = list(view.targets)
    else:
        del facts["max_rank"], facts["targets"]
    facts["created"] = f"{duration(time.time() - view.created_at_s)} ago"
    facts["keep_alive"] = "forever" if view.keep_alive_s is None else duration(view.keep_alive_s)
    if view.upstream is not None:
        facts["upstream"] = _upstream(view.upstream)
    print_table(view.name, facts)


def _upstream(upstream: UpstreamView) -> str:
    deployed = upstream.deployed_version
    unanswered = f"; check failed: {upstream.reason}" if upstream.reason else ""
    if upstream.noticed_at_s is None:
        return f"{upstream.state}, deployed: {deployed}{unanswered}"
    ago = duration(time.time() - upstream.noticed_at_s)
    return (
        f"changed to {upstream.current_version}, noticed {ago} ago; still serving {deployed}; to update: "
        f"{upstream.remedy}{unanswered}"
    )


def _show_place(path: Path, as_json: bool) -> None:
    from hearth.models.families import read_arch
    from hearth.models.layout import layout_of, num_parameters
    from hearth.store.format.convert import open_source
    from hearth.store.format.description import read_description
    from hearth.store.format.manifest import MANIFEST, Manifest

    if (path / MANIFEST).is_file():
        manifest = read_description(path)
        facts = _stored_facts(manifest)
        if not isinstance(manifest, Manifest):
            if as_json:
                typer.echo(json.dumps(facts))
            else:
                print_table(path.name or str(path), facts)
            return
        arch = manifest.arch
    else:
        if path.is_dir():
            arch = read_arch(path)
        else:
            with open_source(path) as source:
                arch = source.arch
        facts = {
            "num_parameters": num_parameters(arch),
            "bfloat16_bytes": layout_of(arch, "bfloat16").num_bytes,
        }
    if as_json:
        typer.echo(json.dumps(asdict(arch) | facts))
        return
    lists = {"windows": ["all tokens" if tokens is None else tokens for tokens in arch.windows]}
    print_table(path.name or str(path), {**facts, **asdict(arch), **lists})


def _version(directory: Path) -> int | None:
    """Return the inode, which changes when the directory is replaced."""
    try:
        return directory.stat().st_ino
    except OSError:
        return None


def _stored_facts(manifest: StoredManifest) -> dict[str, object]:
    from hearth.store.format.adapter_manifest import AdapterManifest
    from hearth.store.format.manifest import Manifest

    facts: dict[str, object] = {"dtype": manifest.dtype}
    if isinstance(manifest, Manifest):
        facts |= {"quant": manifest.quant, "num_parameters": manifest.num_parameters}
        layers = list(manifest.layers)
    elif isinstance(manifest, AdapterManifest):
        facts |= {"adapts": manifest.family, "num_targets": len(manifest.targets)}
        facts |= {"max_rank": max(part.rank for one in manifest.targets for part in one.slices)}
        layers = [layer for _, layer in manifest.layout.layers]
    return facts | {
        "num_bytes": manifest.num_bytes,
        "layer_bytes": [layer.end - layer.begin for layer in layers],
        "num_chunks": len(manifest.chunks),
        "chunk_bytes": manifest.chunk_bytes,
        "files": [file.name for file in manifest.files],
        "digest": manifest.digest,
    }


def _throughput(manifest: StoredManifest, total_s: float) -> str:
    return (
        f"{manifest.num_bytes:,} bytes in {len(manifest.chunks)} chunks, {total_s:.1f} s, "
        f"{manifest.num_bytes / total_s / 1e9:.2f} GB/s"
    )
