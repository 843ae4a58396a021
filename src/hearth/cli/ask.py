"""`hearth run`: ask a model and stream its answer. Converts nothing."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hearth.cli.console import AsJson, ConfigFile, Dtype, Settings, app, configured, err, existing
from hearth.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from hearth.llm import LLM
    from hearth.store.record import LoadRecord


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def _existing_or_url(model: str) -> str:
    return model if "://" in model else str(existing(Path(model)))


ModelPlace = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A converted model, its URL (s3://, https://), a Hugging Face directory or a GGUF file.",
        callback=_existing_or_url,
    ),
]


@app.command()
def run(
    model: ModelPlace,
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

      hearth run s3://models/qwen-7b "Hello" --set store.disk_bytes=100GiB
    """
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    hearth_config = configured(config, settings)
    text = sys.stdin.read() if prompt == "-" else prompt
    started_s = time.perf_counter()
    with err.status(f"loading {model}"):
        from hearth.llm import LLM

        llm = LLM(
            model,
            device=device.value,
            dtype=dtype.value,
            engine=hearth_config.engine,
            store=hearth_config.store,
        )
    with llm:
        start_s = time.perf_counter() - started_s
        answer = _ask(llm, text, params, is_chat=llm.has_chat_template and not raw, quiet=as_json)
        record = llm.wait_loaded()
    if as_json:
        load = None if record is None else asdict(record)
        typer.echo(json.dumps({**asdict(answer), "start_s": start_s, "load": load}))
    else:
        loaded = "" if record is None else f", {_told(record)}"
        err.print(Text(f"{answer.summary}, started in {start_s:.1f} s{loaded}", style="dim"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    first_token_s: float
    total_s: float  #: from the question to the last token

    @property
    def summary(self) -> str:
        num_tokens = len(self.token_ids)
        return (
            f"{num_tokens} tokens, {num_tokens / self.total_s:.1f} tokens/s, "
            f"first after {self.first_token_s:.2f} s"
        )


def _told(record: LoadRecord) -> str:
    rungs = ", ".join(f"{use.num_bytes / 1e9:.2f} GB from {rung}" for rung, use in record.rungs.items())
    return f"loaded in {record.total_s:.2f} s ({rungs})"


def _ask(llm: LLM, text: str, params: SamplingParams, *, is_chat: bool, quiet: bool) -> _Answer:
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
    return _Answer("".join(pieces), tuple(token_ids), finish_reason, first_token_s, total_s)
