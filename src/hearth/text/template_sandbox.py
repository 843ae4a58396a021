"""The environment in which chat templates run: jinja2's immutable sandbox with a meter. Knows no messages.

A template comes with a model from anywhere, so it may be an endless loop or a bomb. It runs in a thread,
which nobody can stop from outside. So everything that repeats or multiplies is metered where jinja2 compiles
it: loops, calls and filters look at the clock, and what makes text or containers pays for their size *before*
it does, because C code that has begun is not interrupted. Of filters, tests and methods there are only those
that prompts are known to need, and nothing is computed while a template is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from hearth.text.template_filters import (
    MAX_BITS,
    MAX_WIDTH,
    check_set,
    check_split,
    metered_filters,
    metered_tests,
    paced,
)
from hearth.text.template_meter import READ_SHARE, OverLimit, joined, read, spend, walked, weigh

_GLOBALS = ("dict", "namespace", "range")
_TEXT_METHODS = frozenset(
    [
        *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
        *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"),
        *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    ]
)
#: Methods of texts that make nothing.
_READING_METHODS = frozenset(
    [
        *("count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower"),
        *("isnumeric", "isspace", "istitle", "isupper", "rfind", "rindex", "startswith"),
    ]
)
_MAPPING_METHODS = frozenset(["get", "items", "keys", "values"])
#: Objects of jinja2's own, which know what of them is safe.
_OF_JINJA = (BlockReference, LoopContext, Macro, Namespace, TemplateReference, Undefined)
_PACED = "_paced"  #: the filter that every loop gets


@pass_context
def _finalized(context: Context, value: object) -> object:
    """Pay for a value that is put out. The context keeps jinja2 from computing it as it compiles."""
    return walked(value)


class _Generator(CodeGenerator):
    """Compiles `~`, literals, slices and comparisons to calls of the environment, as other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(str(environment.walked(part)) for part in (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.walked(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.walked(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self.write("environment.walked(")
            super().visit_Tuple(node, frame)
            self.write(")")
        else:  # a target, as in `for key, value in ...`
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.sliced(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.read(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} environment.read(")
        self.visit(node.expr, frame)
        self.write(")")


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which all that repeats or multiplies pays."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])
    concat = staticmethod(joined)
    walked = staticmethod(walked)
    read = staticmethod(read)

    @staticmethod
    def sliced(value: object) -> object:
        spend(_size(value))
        return value

    def __init__(self, extensions: list[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=_finalized,
            optimized=False,  # it would compute constants, which may be bombs, too
        )
        self.filters = {**metered_filters(self.filters), _PACED: paced}
        self.tests = metered_tests(self.tests)  # type: ignore[assignment, arg-type] # bare functions to mypy
        self.globals = {name: self.globals[name] for name in _GLOBALS}

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            iterable = nodes.Filter(loop.iter, _PACED, [], [], None, None, lineno=loop.lineno)
            loop.iter = iterable.set_environment(self)
        return super()._generate(source, name, filename, defer_init)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        match obj:
            case str():
                return attr in _TEXT_METHODS
            case Mapping():
                return attr in _MAPPING_METHODS
            case _:
                return isinstance(obj, _OF_JINJA) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # most of what there is
            spend(len(left) + len(right))
            return left + right
        _check_operation(operator, left, right)
        result: object = super().call_binop(context, operator, left, right)
        return result

    # The two underscores are jinja2's: a template may pass arguments under any name.
    def call(__self, __context: Context, __called: object, *args: object, **kwargs: object) -> object:
        spend()
        if isinstance(__called, LoopContext):  # a recursive loop goes through what it is called with
            args = tuple(paced(arg) if isinstance(arg, Iterable) else arg for arg in args)
        # The sandbox wraps `str.format`, and what it wraps is a method, too.
        method = getattr(__called, "__wrapped__", __called)
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", None)
        if isinstance(text, str):
            match name, args:
                case "format" | "format_map", _:  # the sandbox has a safe one of either
                    _check_format(text, [*args, *kwargs.values()])
                case "join", (items, *_):
                    args = (walked(list(paced(items)) if isinstance(items, Iterable) else items),)
                    spend(len(text) * _size(args[0]))
                case "replace", (str(old), new, *_):
                    spend(text.count(old) * _size(new))
                case "strip" | "lstrip" | "rstrip", (chars, *_):
                    check_set(chars)
                case "split" | "rsplit" | "splitlines", _:
                    check_split(text, [*args, *kwargs.values()])
            spend(len(text) // (READ_SHARE if name in _READING_METHODS else 1))
        return walked(super().call(__context, __called, *args, **kwargs))

    def call_filter(self, name: str, value: object, *args: object, **kwargs: object) -> object:
        """Call a filter by its name, as `map` does for each item."""
        spend()
        result: object = super().call_filter(name, value, *args, **kwargs)  # type: ignore[arg-type] # as given
        return result


def _check_operation(operator: str, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = [left.bit_length(), right.bit_length()]
        if operator == "**":
            bits.append(bits[0] * abs(right))
        if max(bits) > MAX_BITS:
            raise OverLimit(f"it computes with a number longer than the limit: {MAX_BITS} bits")
    elif operator == "*":
        spend(_size(left) * max(right, 1) if isinstance(right, int) else 1)
        spend(_size(right) * max(left, 1) if isinstance(left, int) else 1)
    elif operator == "+":
        spend(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, [right])


def _check_format(form: str, values: list[object]) -> None:
    """Refuse a format that asks for wide text; widths may stand in the format, or be values themselves."""
    num_chars = weigh(values)
    widths = [width.lstrip("0") for width in re.findall(r"\d+", form)]
    if any(len(width) > 3 for width in widths) or "*" in form or re.search(r"\{[^{}]*\{", form):
        raise OverLimit(f"it pads text to a width beyond the limit: {MAX_WIDTH}")
    num_fields = form.count("{") + form.count("%")  # each may be all of the values
    spend(len(form) + sum(int(width or 0) for width in widths) + num_fields * num_chars)


def _size(value: object) -> int:
    """Return the size of a value in characters: an element of a list takes as much memory as eight."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 1
