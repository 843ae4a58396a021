"""`hearth chat`: a conversation in a terminal or from a pipe."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from hearth.cli.answerer import Answerer, LocalOptions, answerer_of, shown_reasoning
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    ApiKey,
    ConfigFile,
    DataDirectory,
    Settings,
    Url,
    app,
    err,
)
from hearth.cli.tab_completion import ModelName
from hearth.control.deploy.preset import Preset
from hearth.core.errors import HearthError
from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.text.chat_template import Message

#: The parameters of answers in a conversation without flags and preset.
USUAL = SamplingParams(temperature=0.7, max_tokens=1024)
#: The most tokens of an answer to a single prompt.
PROMPTED = 256
MaxTokens = Annotated[
    int | None,
    typer.Option(help=f"Maximum tokens of an answer; {PROMPTED} to a prompt, {USUAL.max_tokens} in a talk."),
]
Temperature = Annotated[float | None, typer.Option(help=f"0: greedy; by default {USUAL.temperature}.")]
Seed = Annotated[int | None, typer.Option(help="Makes answers reproducible.")]
HELP = "/clear starts over, /exit or Ctrl-D quits, Ctrl-C stops an answer, /help shows this"


@app.command(rich_help_panel="Questions")
def chat(
    context: typer.Context,
    name: ModelName,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Talk with a model.

    /clear starts over, /exit or Ctrl-D quits, Ctrl-C stops an answer. From a pipe, every line is a message.
    Uses the running service, or loads the model in this process.

    [bold]Examples[/bold]

      hearth chat smollm2

      printf 'My name is Ada.\\nWhat is my name?\\n' | hearth chat smollm2
    """
    given = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    Preset().params(USUAL, **given)  # refuses a wrong one before anything is loaded
    options = LocalOptions(config=config, settings=settings)
    with answerer_of(context, name, url, api_key, data_dir, options) as answerer:
        converse(answerer, answerer.preset.params(USUAL, **given), system)


def converse(answerer: Answerer, params: SamplingParams, system: str | None = None) -> None:
    """Hold a conversation with what standard input says, by a prompt if that is a terminal."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        err.print(Text(HELP, style="dim"))
    _talk(answerer, _lines(is_terminal), params, system, is_terminal)


def _talk(
    answerer: Answerer, lines: Iterator[str], params: SamplingParams, system: str | None, is_terminal: bool
) -> None:
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/help" | "/?" if is_terminal:
                err.print(Text(HELP, style="dim"))
                continue
            case "/clear":
                messages = list(beginning)
                continue
            case word if word.startswith("/") and is_terminal:
                err.print(Text(f"unknown command `{word}`: {HELP}", style="yellow"))
                continue
        conversation: list[Message] = [*messages, {"role": "user", "content": line.strip()}]
        try:
            with _unechoed() if is_terminal else nullcontext():
                answer = _answer(answerer, conversation, params)
        except HearthError as error:
            if not is_terminal:
                raise
            err.print(Text(f"hearth: {error}", style="red"), soft_wrap=True)
            continue
        messages = [*conversation, {"role": "assistant", "content": answer}]


def _answer(answerer: Answerer, messages: list[Message], params: SamplingParams) -> str:
    texts: list[str] = []
    try:
        with closing(answerer.chat(messages, params)) as deltas:
            for delta in shown_reasoning(deltas):
                texts.append(delta.text)
                typer.echo(delta.text, nl=False)
    except KeyboardInterrupt:
        err.print(Text(" (stopped)", style="dim"), end="")
    typer.echo()
    return "".join(texts)


@contextmanager
def _unechoed() -> Iterator[None]:
    """Hide what is typed while an answer is printed; the next prompt shows and reads it."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    silent = [*before]
    silent[3] &= ~termios.ECHO  # of the local modes; Ctrl-C still interrupts
    termios.tcsetattr(file, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSANOW, before)


def _lines(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        yield from sys.stdin
        return
    import readline  # noqa: F401 - `input` edits lines and remembers them once this is there

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            typer.echo()
        except EOFError:
            typer.echo()
            return
