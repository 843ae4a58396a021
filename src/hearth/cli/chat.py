"""A conversation at a terminal: `hearth run NAME` without a prompt."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from hearth.cli.answerer import Answerer, shown_reasoning
from hearth.cli.console import err
from hearth.core.errors import HearthError
from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.text.chat_template import Message

#: Begins and ends a message of several lines.
QUOTE = '"""'
HINT = "/help lists commands, /bye or Ctrl-D ends the conversation"
HELP = f"""\
/clear       start over
/bye         end the conversation; also /exit, /quit and Ctrl-D
/help        show this; also /?
Ctrl-C       stop an answer
{QUOTE}          begin and end a message of several lines"""


def converse(answerer: Answerer, params: SamplingParams, beginning: Sequence[Message]) -> None:
    """Answer what is typed, until the end. `beginning`: messages before the first."""
    err.print(Text(HINT, style="dim"))
    messages = [*beginning]
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/help" | "/?":
                err.print(Text(HELP, style="dim"))
                continue
            case "/clear":
                messages = [*beginning]
                continue
            case text if (word := text.split()[0]).startswith("/") and "/" not in word[1:]:
                err.print(Text(f"unknown command `{word}`; {HINT}", style="yellow"), soft_wrap=True)
                continue
        conversation: list[Message] = [*messages, {"role": "user", "content": line.strip()}]
        try:
            with _unechoed():
                answer = _answer(answerer, conversation, params)
        except HearthError as error:
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
                if delta.finish_reason == "length":
                    err.print(Text(" (cut off at the limit, see `--max-tokens`)", style="dim"), end="")
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


def _lines() -> Iterator[str]:
    import readline  # noqa: F401 - `input` edits lines and remembers them once this is there

    while True:
        try:
            line = input("> ")
            yield _quoted(line) if line.lstrip().startswith(QUOTE) else line
        except KeyboardInterrupt:
            typer.echo()
        except EOFError:
            typer.echo()
            return


def _quoted(first: str) -> str:
    """Read on to the closing quotes, and return what is between."""
    text = first.lstrip().removeprefix(QUOTE)
    while not text.rstrip().endswith(QUOTE):
        text += "\n" + input(". ")
    return text.rstrip().removesuffix(QUOTE)
