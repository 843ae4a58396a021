"""The process in which chat templates run; `render_pool.py` starts it.

A template comes with a model and is not trusted: it may loop forever or ask for terabytes. jinja2's sandbox
keeps it from Python's internals. The kernel limits its memory, and ends the process by SIGALRM at the time
limit, even in C code.

Reads a request per line, `[source, variables, limit_s]` in JSON, where no variables mean to compile only.
Answers each with a line `[outcome, text]`. Ends with its standard input. Imports nothing of Hearth, so that
it starts in tens of milliseconds.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from typing import NoReturn

import msgspec
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 1 << 30  #: of address space; rendering a request of 16 MiB takes less than half of it
MAX_TEMPLATES = 64  #: compiled ones that are kept
MAX_MESSAGE_CHARS = 1000


class _Refused(TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks the assistant's words for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all; the gateway decides
    environment = _environment()
    compiled = functools.lru_cache(MAX_TEMPLATES)(environment.from_string)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    max_bytes = MAX_BYTES if most == resource.RLIM_INFINITY else min(MAX_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, most))
    for line in sys.stdin.buffer:
        source, variables, limit_s = msgspec.json.decode(line)
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-6))  # 0 would be no limit
        try:
            template = compiled(source)
        except Exception as error:
            answer = "broken", _compile_error(error)
        else:
            answer = ("text", "") if variables is None else _rendered(template, variables)
        reply = msgspec.json.encode(answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _rendered(template: Template, variables: dict[str, object]) -> tuple[str, str]:
    try:
        text = template.render(variables)
        text.encode()  # raises where it has lone surrogates
        return "text", text
    except _Refused as refusal:
        return "refused", str(refusal.message)[:MAX_MESSAGE_CHARS]
    except MemoryError:
        return "stopped", f"it needs more memory than the limit: {MAX_BYTES >> 20} MiB"
    except SecurityError as breach:
        return "unsafe", str(breach)[:MAX_MESSAGE_CHARS]
    except Exception as misfit:  # whatever Python raises when a value is not of the kind that it expects
        return "unfit", f"{type(misfit).__name__}: {misfit}"[:MAX_MESSAGE_CHARS]


def _compile_error(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return f"{type(error).__name__}: {error!s:.200}"  # nested too deep for Python, for example


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON: jinja2's own filter escapes HTML, which models have not seen in training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


if __name__ == "__main__":
    main()
