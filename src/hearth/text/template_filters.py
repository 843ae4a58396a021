"""The filters and tests that chat templates may use, each with its price. There are no others.

What multiplies and no prompt needs is left out: a filter that is not here does not compile.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from jinja2 import Environment, pass_environment
from jinja2.filters import do_int, do_title

from hearth.text.template_meter import READ_SHARE, OverLimit, joined, read, spend, walked, weigh

#: The longest run of characters that a width in a format or an indentation may ask for.
MAX_WIDTH = 1000
#: Numbers longer than this have no place in a prompt, and arithmetic on them takes long.
MAX_BITS = 4096
#: The most spaces by which a level of JSON is indented.
MAX_INDENT = 16
#: The most characters to strip, or between the elements of JSON: each counts many times.
MAX_SET_CHARS = 64
#: The price of each part of a text that is split, in characters.
SPLIT_CHARS = 16

#: Filters that take a moment, whatever they are given.
_QUICK_FILTERS = ("abs", "count", "d", "default", "first", "items", "last", "length")
#: Filters that copy a text.
_TEXT_FILTERS = ("capitalize", "float", "lower", "safe", "upper")
#: Filters that look at every element of what they are given.
_PACED_FILTERS = ("list", "map", "reject", "rejectattr", "select", "selectattr")
#: Filters that compare elements with each other.
_COMPARING_FILTERS = ("dictsort", "max", "min", "sort", "unique")
_QUICK_TESTS = (
    *("boolean", "callable", "defined", "even", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "odd", "sameas", "sequence", "string", "true", "undefined"),
)
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan"),
    *("lower", "lt", "ne", "upper"),
)
_SPACES = " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def metered_filters(own: Mapping[str, Callable[..., object]]) -> dict[str, Callable[..., object]]:
    """Return the filters that templates may use: some of jinja2's `own`, made to pay, and a few of ours."""
    return {
        **{name: own[name] for name in _QUICK_FILTERS},
        **{name: _metered(own[name], walked) for name in _TEXT_FILTERS},
        **{name: _metered(own[name], paced) for name in _PACED_FILTERS},
        **{name: _metered(own[name], _listed) for name in _COMPARING_FILTERS},
        "indent": _indent,
        "int": _int,
        "join": _join,
        "replace": _replace,
        "reverse": _reverse,
        "string": _string,
        "sum": _sum,
        "title": _title,
        "tojson": _tojson,
        "trim": _trim,
    }


def metered_tests(own: Mapping[str, Callable[..., object]]) -> dict[str, Callable[..., object]]:
    """Return the tests that templates may use: some of jinja2's `own`, made to pay."""
    return {
        **{name: own[name] for name in _QUICK_TESTS},
        **{name: _metered(own[name], read) for name in _COMPARING_TESTS},
    }


def _metered(function: Callable[..., object], pay: Callable[..., object]) -> Callable[..., object]:
    """Return a filter or test of jinja2 that pays for what it is given."""
    index = 1 if hasattr(function, "jinja_pass_arg") else 0  # what jinja2 itself passes comes first

    @functools.wraps(function)
    def metered(*args: object, **kwargs: object) -> object:
        spend()
        weigh([*args[index + 1 :], *kwargs.values()], READ_SHARE)
        return function(*args[:index], pay(args[index]), *args[index + 1 :], **kwargs)

    return metered


def paced(items: Iterable[object]) -> Iterator[object]:
    """Yield the items, with a look at the clock at each."""
    for item in items:
        spend()
        yield item


def _listed(items: object) -> object:
    if isinstance(items, Iterable) and not isinstance(items, str | Mapping):
        items = list(paced(items))
    return walked(items)


def _reverse(items: str | Iterable[object]) -> object:
    return walked(items[::-1]) if isinstance(items, str) else reversed(list(paced(items)))


@pass_environment
def _join(
    environment: Environment,
    items: Iterable[object],
    separator: object = "",
    attribute: str | None = None,
) -> str:
    return joined((_string(item) for item in _each(environment, items, attribute)), _string(separator))


@pass_environment
def _sum(
    environment: Environment, items: Iterable[object], attribute: str | None = None, start: object = 0
) -> int | float:
    """Add up numbers alone: to add up lists or texts copies them again and again."""
    total: int | float = 0
    for item in (start, *_each(environment, items, attribute)):
        if not isinstance(item, int | float):
            raise TypeError(f"`sum` adds numbers, given: {type(item).__name__}")
        total += item
    return total


def _each(environment: Environment, items: Iterable[object], attribute: str | None) -> Iterable[object]:
    each = paced(items)
    return each if attribute is None else (environment.getitem(item, attribute) for item in each)


def _string(value: object) -> str:
    return str(walked(value))


def _title(text: object) -> str:
    text = _string(text)
    spend(SPLIT_CHARS * len(text))  # it takes the text apart
    return do_title(text)


def _trim(text: object, chars: str | None = None) -> str:
    check_set(chars)
    return _string(text).strip(chars)


def _int(value: object, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > MAX_BITS // 4:
        raise OverLimit(f"it reads a number longer than the limit: {MAX_BITS // 4} digits")
    return do_int(value, default, base)


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    text = _string(text)
    spend(text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent lines as jinja2's own filter does."""
    if isinstance(width, int):
        width = " " * min(width, MAX_WIDTH)
    text = str(walked(text)) + "\n"  # so that a last line of nothing is one
    lines = text.splitlines()
    spend(len(lines) * len(width))
    indented = [width + line if line or blank else line for line in lines]
    return "\n".join(indented if first else [*lines[:1], *indented[1:]])


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON: jinja2's own filter escapes HTML, which models have not seen in training."""
    check_set("".join(separators or ()))
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(indent, MAX_INDENT),
        separators=separators,
        sort_keys=sort_keys,
    )
    walked(value)
    if indent is None:
        text = encoder.encode(value)
        spend(len(text))
        return text
    # Piece by piece: an element in the depth has a long line.
    pieces = []
    for piece in encoder.iterencode(value):
        spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def check_set(chars: object) -> None:
    if isinstance(chars, str) and len(chars) > MAX_SET_CHARS:
        raise OverLimit(f"it strips or inserts more characters than the limit: {MAX_SET_CHARS}")


def check_split(text: str, args: list[object]) -> None:
    separator = next((arg for arg in args if isinstance(arg, str) and arg), None)
    num_parts = sum(map(text.count, _SPACES if separator is None else (separator,)))
    at_most = next((arg for arg in args if type(arg) is int and arg >= 0), num_parts)
    spend(SPLIT_CHARS * min(num_parts, at_most))
