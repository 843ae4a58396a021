"""The HTTP API as Markdown, from its OpenAPI document, and as the page `/docs`, which loads nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]


def api_reference(document: Schema) -> str:
    """Return routes and bodies as Markdown. `document`: of OpenAPI."""
    schemas = document["components"]["schemas"]
    bodies: dict[str, str] = {}
    rows_by_tag: dict[str, list[tuple[str, str]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            route = f"`{method.upper()} {path}`"
            body = _body_name(operation)
            if body is not None:
                bodies.setdefault(body, route)
            tag = (operation.get("tags") or ["Other"])[0]
            rows_by_tag.setdefault(tag, []).append((route, _purpose(operation, body)))
    parts = []
    for tag, rows in rows_by_tag.items():
        parts.append(f"## {tag}\n\n{markdown_table(('route', 'what it does'), rows)}\n")
    parts.append("## Bodies\n")
    shown = _reached(["ErrorBody", "AnthropicError", "OllamaError", *bodies], schemas)
    parts += [_body(name, schemas, bodies.get(name)) for name in shown]
    return "\n".join(parts)


def _body_name(operation: Schema) -> str | None:
    return next(_references(operation.get("requestBody", {})), None)


def _purpose(operation: Schema, body: str | None) -> str:
    """Return what a route does: summary, docstring, parameters of the query, and where its body is."""
    words = [f"{operation.get('summary', '')}.", str(operation.get("description") or "")]
    query = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
    if query:
        words.append(f"Query: {', '.join(f'`{name}`' for name in query)}.")
    if body is not None:
        words.append(f"Body: {_link(body)}.")
    return _one_line(" ".join(words))


def _reached(names: Sequence[str], schemas: Mapping[str, Schema]) -> list[str]:
    """Return schemas with fields and, once each, those that their fields refer to."""
    reached: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name not in reached and schemas[name].get("properties"):
            reached.append(name)
            waiting[:0] = _references(schemas[name])
    return reached


def _references(schema: object) -> Iterator[str]:
    match schema:
        case {"$ref": str(reference)}:
            yield reference.rpartition("/")[2]
        case dict():
            for value in schema.values():
                yield from _references(value)
        case list():
            for value in schema:
                yield from _references(value)


def _body(name: str, schemas: Mapping[str, Schema], route: str | None) -> str:
    schema = schemas[name]
    required = schema.get("required", ())
    rows = [
        (
            f"`{field}`" + (" (required)" if field in required else ""),
            _type(value, schemas),
            _one_line(str(value.get("description", ""))),
        )
        for field, value in schema["properties"].items()
    ]
    purpose = _one_line(str(schema.get("description", "")))
    heading = f"### {name}\n\n" + (f"The body of {route}. " if route else "")
    return f"{heading}{purpose}".rstrip() + f"\n\n{markdown_table(('field', 'value', 'meaning'), rows)}\n"


def _type(schema: Schema, schemas: Mapping[str, Schema]) -> str:
    match schema:
        case {"$ref": str(reference)}:
            name = reference.rpartition("/")[2]
            return _link(name) if schemas[name].get("properties") else "any JSON"
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            kinds = [_type(option, schemas) for option in options if option.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
        case {"allOf": [one]}:
            return _type(one, schemas)
        case {"enum": list(values)}:
            return " or ".join(f"`{value}`" for value in values if value != "")
        case {"const": value}:
            return f"`{value}`"
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type(items, schemas)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"object of {_type(values, schemas)}"
        case {"type": str(kind)}:
            return _TYPES.get(kind, kind) + _range(schema)
        case _:
            return "any JSON"


_TYPES = {"string": "text", "integer": "whole number", "boolean": "`true` or `false`", "array": "list"}
#: What is no limit to people.
_ENDLESS = 2**31 - 1


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    has_low = isinstance(low, int | float) and low > -_ENDLESS
    has_high = isinstance(high, int | float) and high < _ENDLESS
    if has_low and has_high:
        return f", {low:g} to {high:g}"
    if above is not None:
        return f", above {above:g}" + (f" to {high:g}" if has_high else "")
    return f", at least {low:g}" if has_low else ""


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Hearth: HTTP API</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884 }}
code {{ font: 13px ui-monospace, monospace; background: #8882; padding: .1rem .3rem; border-radius: .2rem }}
</style>
{body}
</html>
"""
_INTRODUCTION = """\
# Hearth {version}: HTTP API

If the service has API keys, send one as `Authorization: Bearer KEY` or `x-api-key: KEY`. The base URL of
OpenAI clients ends with `/v1`, that of Anthropic and Ollama clients with the port. For programs:
[openapi.json](/openapi.json).

"""


def api_page(document: Schema) -> str:
    """Return the reference as HTML."""
    text = _INTRODUCTION.format(version=document["info"]["version"]) + api_reference(document)
    return _PAGE.format(body="\n".join(_html_blocks(text)))


def _html_blocks(markdown: str) -> Iterator[str]:
    """Yield headings, tables and paragraphs of the Markdown that this module writes."""
    for block in re.split(r"\n{2,}", html.escape(markdown.strip(), quote=False)):
        if heading := re.match("(#+) (.*)", block):
            level = len(heading[1])
            yield f'<h{level} id="{heading[2].lower()}">{heading[2]}</h{level}>'
        elif block.startswith("| "):
            header, _, *rows = block.splitlines()
            yield f"<table>{_html_row(header, 'th')}{''.join(_html_row(row, 'td') for row in rows)}</table>"
        else:
            yield f"<p>{_html_spans(block)}</p>"


def _html_row(line: str, tag: str) -> str:
    cells = re.split(r" (?<!\\)\| ?", line[2:])[:-1]
    return "<tr>" + "".join(f"<{tag}>{_html_spans(cell)}</{tag}>" for cell in cells) + "</tr>"


def _html_spans(text: str) -> str:
    text = re.sub(r"\[([^]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text.replace("\\|", "|"))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
