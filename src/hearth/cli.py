"""The `hearth` command: reads flags, puts the parts together and prints. It decides nothing about serving.

torch and all that needs it are imported inside the commands, so that `hearth --help` answers at once.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hearth.config import HearthConfig, load, to_toml
from hearth.errors import ConfigError, HearthError, ModelError, RequestError
from hearth.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from hearth.llm import LLM

app = typer.Typer(
    help="Serve many large language models on few GPUs.",
    epilog="Start with `hearth doctor`, then `hearth run PATH 'your question'`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def _model_dir(path: Path) -> Path:
    if not path.is_dir():
        raise ModelError(f"no model directory at `{path}`; name the folder that holds its `config.json`")
    return path


ModelPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="Model directory in Hugging Face format.", callback=_model_dir)
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings in TOML.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, over the file's; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    try:
        app(argv, prog_name="hearth")
    except HearthError as error:
        _err.print(Text(f"hearth: {error}", style="red"), soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError | ModelError | RequestError) else 1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hearth {_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def run(
    path: ModelPath,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask; - reads standard input.")],
    device: Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")] = Device.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="auto takes what suits model and device.")] = Dtype.AUTO,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Repeats an answer exactly.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it is, no chat template.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model and stream its answer.

    The prompt goes through the model's chat template where there is one; --raw has it continued instead.

    [bold]Examples[/bold]

      hearth run ./SmolLM2-135M-Instruct "Why is the sky blue?"

      hearth run ./llama --raw --temperature 0 "Once upon a time"

      cat notes.txt | hearth run ./qwen - --set engine.kv_bytes=4GiB
    """
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    hearth_config = _configured(config, settings)
    text = sys.stdin.read() if prompt == "-" else prompt
    started_s = time.perf_counter()
    with _err.status(f"loading {path.name or path}"):
        from hearth.llm import LLM

        llm = LLM(path, device=device.value, dtype=dtype.value, engine=hearth_config.engine)
    with llm:
        load_s = time.perf_counter() - started_s
        answer = _ask(
            llm, text, params, load_s=load_s, is_chat=llm.has_chat_template and not raw, quiet=as_json
        )
    if as_json:
        typer.echo(json.dumps(asdict(answer)))
    else:
        _err.print(Text(answer.summary, style="dim"))


@app.command()
def show(path: ModelPath, as_json: AsJson = False) -> None:
    """Show what a model is made of, without loading its weights.

    [bold]Example[/bold]

      hearth show ./Qwen2.5-0.5B-Instruct
    """
    from hearth.models.families import read_arch
    from hearth.models.layout import layout_of

    arch = read_arch(path)
    layout = layout_of(arch, "bfloat16")
    num_parameters = sum(math.prod(tensor.shape) for tensor in layout.tensors)
    if as_json:
        facts = asdict(arch) | {"num_parameters": num_parameters, "bfloat16_bytes": layout.num_bytes}
        typer.echo(json.dumps(facts))
        return
    windows = ["all tokens" if tokens is None else str(tokens) for tokens in dict.fromkeys(arch.windows)]
    facts = {"parameters": f"{num_parameters:,}", "in bfloat16": f"{layout.num_bytes / 2**30:.2f} GiB"}
    _print_table(path.name or str(path), facts | asdict(arch) | {"windows": ", ".join(windows)})


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Report what this machine offers and which kernels Hearth would run on it."""
    with _err.status("looking around"):
        from hearth.doctor import examine

        report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    facts = asdict(report)
    del facts["devices"], facts["notes"]
    for number, device in enumerate(report.devices):
        facts[f"device {number}"] = (
            f"{device.name}, {device.free_bytes / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB free"
        )
    _print_table("hearth doctor", facts)
    for note in report.notes:
        _out.print(Text(f"note: {note}", style="yellow"))


@app.command("config")
def show_config(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Print the settings that apply, as TOML that can be saved and edited.

    [bold]Examples[/bold]

      hearth config > hearth.toml

      hearth config --config hearth.toml --set engine.max_seqs=64
    """
    resolved = _configured(config, settings)
    typer.echo(json.dumps(asdict(resolved)) if as_json else to_toml(resolved), nl=as_json)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    load_s: float
    first_token_s: float
    total_s: float  #: from the question to the last token; loading not included

    @property
    def summary(self) -> str:
        num_tokens = len(self.token_ids)
        return (
            f"{num_tokens} tokens, {num_tokens / self.total_s:.1f} tokens/s, "
            f"first after {self.first_token_s:.2f} s, loaded in {self.load_s:.1f} s"
        )


def _ask(
    llm: LLM, text: str, params: SamplingParams, *, load_s: float, is_chat: bool, quiet: bool
) -> _Answer:
    """Streams the answer to standard output unless `quiet`."""
    prompt = llm.chat_prompt([{"role": "user", "content": text}]) if is_chat else text
    pieces: list[str] = []
    token_ids: list[int] = []
    finish_reason = None
    first_token_s = 0.0
    started_s = time.perf_counter()
    for delta in llm.stream(prompt, params):
        first_token_s = first_token_s or time.perf_counter() - started_s
        pieces.append(delta.text)
        token_ids += delta.token_ids
        finish_reason = delta.finish_reason
        if not quiet:
            typer.echo(delta.text, nl=finish_reason is not None)
    total_s = time.perf_counter() - started_s
    return _Answer("".join(pieces), tuple(token_ids), finish_reason, load_s, first_token_s, total_s)


def _version() -> str:
    try:
        return metadata.version("hearth")
    except metadata.PackageNotFoundError:
        return "(not installed, run from its sources)"


def _configured(path: Path | None, settings: Sequence[str] | None) -> HearthConfig:
    """The resolved configuration; logging follows it from here on."""
    config = load(path, dict(map(_setting, settings or ())))
    logging.basicConfig(
        level=config.log.level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    return config


def _setting(text: str) -> tuple[str, object]:
    """`engine.max_seqs=8` as key and value; what is no TOML value is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"`--set` takes KEY=VALUE, like engine.max_seqs=8, given: {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _print_table(title: str, facts: dict[str, object]) -> None:
    table = Table("", "", title=title, show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text("-" if value is None else str(value)))
    _out.print(table)


if __name__ == "__main__":
    main()
