"""`hearth run`: one prompt, its answer streamed, or a conversation."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hearth.cli.answerer import LocalOptions, answerer_of, shown_reasoning
from hearth.cli.chat import converse
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    SPELLED_DTYPES,
    ApiKey,
    AsJson,
    ConfigFile,
    DataDirectory,
    Device,
    Dtype,
    Settings,
    Url,
    app,
    err,
)
from hearth.cli.endpoint import service_flags
from hearth.cli.tab_completion import complete_model
from hearth.control.deploy.preset import Preset
from hearth.core.errors import ConfigError
from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.cli.client import AnswerDelta
    from hearth.store.transfer.record import LoadRecord
    from hearth.text.chat_template import Message

#: The parameters of answers without flags and preset.
USUAL = SamplingParams(temperature=0.7, max_tokens=1024)
#: How long a pipe may say nothing until the user is told that its end is waited for.
PIPE_S = 2.0


@app.command(rich_help_panel="Questions")
def run(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of a deployed model, hf:ORG/NAME, directory, GGUF file or URL (s3://, https://).",
            autocompletion=complete_model,
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompt, after what a pipe says. Without either: a conversation.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one.")] = Device.AUTO,
    dtype: Annotated[
        Dtype, typer.Option(metavar="DTYPE", help=f"{SPELLED_DTYPES}; auto: fits model and device.")
    ] = Dtype.AUTO,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Maximum tokens of an answer; by default {USUAL.max_tokens}.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help=f"0: greedy; by default {USUAL.temperature}.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers reproducible.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT without a chat template.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Send a prompt to a model and stream its answer, or talk with it.

    Uses the running service for a deployed model. Without a service, and for a path or URL, the model is
    loaded in this process. hf:ORG/NAME is deployed first, after a question. The model's chat template is
    applied if there is one, unless --raw is given. At a terminal and without PROMPT, it is a conversation:
    /help lists its commands, /bye or Ctrl-D ends it.

    [bold]Examples[/bold]

      hearth run smollm2 "Why is the sky blue?"

      hearth run smollm2 --system "Answer in one word."

      hearth run ./llama --raw --temperature 0 "Once upon a time"

      cat notes.txt | hearth run smollm2 "Summarise this text."

      hearth run s3://models/qwen-7b "Hello" --set store.disk_bytes=100GiB
    """
    prompt = " ".join(words) if words else None
    is_conversation = prompt is None and sys.stdin.isatty()
    given = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    Preset().params(USUAL, **given)  # refuses a wrong one before anything is loaded
    options = LocalOptions(device.value, dtype.value, config, settings)
    text = None if is_conversation else _whole_prompt(prompt)
    if text == "":
        raise ConfigError("no prompt: standard input is empty; give one as an argument or by a pipe")
    started_s = time.perf_counter()
    with answerer_of(context, model, url, api_key, data_dir, options) as answerer:
        params = answerer.preset.params(USUAL, **given)
        beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        is_chat = answerer.has_chat_template and not raw
        if not is_chat and (beginning or text is None):
            what = "`--system`" if beginning else "a conversation"
            raise ConfigError(f"{what} needs a chat template, which is not applied here; give a PROMPT alone")
        if text is None:
            return converse(answerer, params, beginning)
        start_s = time.perf_counter() - started_s
        messages: list[Message] = [*beginning, {"role": "user", "content": text}]
        deltas = answerer.chat(messages, params) if is_chat else answerer.complete(text, params)
        answer = _timed(deltas, quiet=as_json)
        record = answerer.wait_loaded()
    if as_json:
        load = None if record is None else asdict(record)
        typer.echo(json.dumps({**asdict(answer), "start_s": start_s, "load": load}))
    else:
        flags = service_flags(context, url, data_dir)
        err.print(Text(_summary(answer, start_s, record, flags), style="dim"), soft_wrap=True)


def _whole_prompt(prompt: str | None) -> str:
    """Return the prompt behind what standard input says, if that is a pipe or a file, as Ollama does."""
    is_alone = prompt in (None, "-")
    if not is_alone and not _is_piped():
        return prompt or ""
    piped = sys.stdin.read().removesuffix("\n")  # which `echo` adds
    return piped if is_alone else "\n\n".join(filter(None, (piped, prompt)))


def _is_piped() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError):  # none, or not one of the system
        return False
    if stat.S_ISFIFO(mode) and not select.select([sys.stdin], [], [], PIPE_S)[0]:
        err.print(Text("waiting for the end of standard input", style="dim"))
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@dataclass(frozen=True, slots=True)
class _TimedAnswer:
    text: str
    reasoning: str  #: before the text; only of a service
    token_ids: tuple[int, ...]  #: empty from a service, which sends only text
    num_tokens: int
    finish_reason: str | None
    first_token_s: float
    total_s: float  #: from the prompt to the last token
    request_id: str | None  #: of a service


def _summary(answer: _TimedAnswer, start_s: float, record: LoadRecord | None, flags: str) -> str:
    summary = (
        f"{answer.num_tokens} tokens, {answer.num_tokens / answer.total_s:.1f} tokens/s, "
        f"first after {answer.first_token_s:.2f} s"
    )
    if answer.reasoning and not answer.text:
        summary = f"no answer, only thinking: {summary}"
    if answer.finish_reason == "length":
        summary = f"cut off at the limit, see `--max-tokens`: {summary}"
    if answer.request_id is not None:
        return f"{summary}; `hearth explain {answer.request_id}{flags}` shows details"
    summary += f", started in {start_s:.1f} s"
    if record is None:
        return summary
    rungs = ", ".join(f"{use.num_bytes / 1e9:.2f} GB from {rung}" for rung, use in record.rungs.items())
    return f"{summary}, loaded in {record.total_s:.2f} s ({rungs})"


def _timed(deltas: Iterator[AnswerDelta], *, quiet: bool) -> _TimedAnswer:
    texts: list[str] = []
    thoughts: list[str] = []
    token_ids: list[int] = []
    num_tokens, finish_reason, request_id, first_token_s = 0, None, None, 0.0
    started_s = time.perf_counter()
    for delta in deltas if quiet else shown_reasoning(deltas):
        if (
            delta.text or delta.reasoning or delta.finish_reason is not None
        ):  # a stream begins before its first token
            first_token_s = first_token_s or time.perf_counter() - started_s
        texts.append(delta.text)
        thoughts.append(delta.reasoning)
        token_ids += delta.token_ids
        num_tokens = delta.num_tokens or num_tokens
        finish_reason = delta.finish_reason or finish_reason
        request_id = delta.request_id
        if not quiet:
            typer.echo(delta.text, nl=delta.finish_reason is not None)
    total_s = time.perf_counter() - started_s
    return _TimedAnswer(
        text="".join(texts),
        reasoning="".join(thoughts),
        token_ids=tuple(token_ids),
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        first_token_s=first_token_s,
        total_s=total_s,
        request_id=request_id,
    )
