"""How the weights of linear layers are stored: a plan names one format for all, and others for some.

    int8                                              all linear layers
    int4-g128-float16-float32 int8:head,down.0-3      4 bits in groups of 128, but the head and four layers 8

A format is `int8`, `fp8`, or 4 bits: the group, the dtype of its scales, that of its minimums if there are
any, and `codebook` if values are looked up. A group is a number of inputs, or `row`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from hearth.core.errors import DeviceError
from hearth.models.arch import MAX_LAYERS

#: Plans with names of their own. An embedding is quantised only if a plan says so.
QUANTS: Mapping[str, str] = {
    "none": "none",
    "int8": "int8",
    "fp8": "fp8",
    "int4": "int4-g32-bfloat16-bfloat16 int8:embed,head",
}

#: Stored dtypes of weights with a scale for each output, by format.
EIGHT_BITS: Mapping[str, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}

#: Modules whose weights are quantised.
LINEARS = frozenset({"embed_in", "qkv", "o", "up", "down", "embed_out", "head"})

_OF_LAYERS = frozenset({"qkv", "o", "up", "down"})

_SCALE_DTYPES = ("float32", "float16", "bfloat16")
_FOUR_BITS = re.compile(
    rf"int4-(?:g(\d{{1,6}})|row)-({'|'.join(_SCALE_DTYPES)})(?:-({'|'.join(_SCALE_DTYPES)}))?(-codebook)?"
)
_WHERE = re.compile(r"([a-z_]+)(?:\.(\d{1,5})(?:-(\d{1,5}))?)?")
MAX_PLAN_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class FourBits:
    group: int | None  #: inputs that share a scale; None: all of a row
    scale: str
    minimum: str | None
    has_codebook: bool = False

    def __str__(self) -> str:
        parts = ["int4", "row" if self.group is None else f"g{self.group}", self.scale]
        return "-".join([*parts, *filter(None, [self.minimum]), *(["codebook"] if self.has_codebook else [])])

    def groups(self, num_inputs: int) -> int | None:
        """Return the number of groups of a row; None: they do not divide it."""
        group = num_inputs if self.group is None else self.group
        return None if num_inputs % group else num_inputs // group


Format: TypeAlias = str | FourBits | None


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """The format of each weight. `others` by module, or by module and layer."""

    default: Format
    others: Mapping[tuple[str, int | None], Format]

    def format_of(self, module: str, layer: int | None) -> Format:
        for key in ((module, layer), (module, None)):
            if key in self.others:
                return self.others[key]
        return self.default if module in LINEARS else None

    def forms_of_layer(self, layer: int) -> tuple[Format, ...]:
        return tuple(self.format_of(module, layer) for module in ("qkv", "o", "up", "down"))

    def only(self, layers: Sequence[int]) -> str:
        """Return the plan of a model of these layers, numbered from 0."""
        names = {(module, None) for module, layer in self.others if layer is None}
        plain = {(module, None) for module in LINEARS - _OF_LAYERS}
        forms: dict[tuple[str, int | None], Format] = {key: self.format_of(*key) for key in names | plain}
        for index, layer in enumerate(layers):
            forms |= {(module, index): self.format_of(module, layer) for module in _OF_LAYERS}
        return QuantPlan.text_of(dict(sorted(forms.items(), key=str)))

    @staticmethod
    @cache
    def parse(text: str) -> QuantPlan:
        """Raises DeviceError for what is neither a name of QUANTS nor a plan."""
        words = QUANTS.get(text, text).split(" ") if len(text) <= MAX_PLAN_CHARACTERS else [""]
        others: dict[tuple[str, int | None], Format] = {}
        for word in words[1:]:
            name, _, places = word.partition(":")
            form = _format(name, text)
            for place in places.split(","):
                found = dict.fromkeys(_places(place, text), form)
                if found.keys() & others.keys():  # or a short plan could take long
                    raise _unknown(text)
                others |= found
        return QuantPlan(_format(words[0], text), others)

    @staticmethod
    def text_of(formats: Mapping[tuple[str, int | None], Format]) -> str:
        """Return the plan of weights with these formats, by module and layer."""
        names = {place: str(form or "none") for place, form in formats.items()}
        linears = [name for (module, _), name in names.items() if module in LINEARS]
        default = max(dict.fromkeys(linears), key=linears.count, default="none")
        places: dict[str, dict[str, list[int]]] = {}
        for (module, layer), name in names.items():
            if name != (default if module in LINEARS else "none"):
                layers = places.setdefault(name, {}).setdefault(module, [])
                if layer is not None:
                    layers.append(layer)
        words = [default]
        for name, by_module in places.items():
            words.append(f"{name}:{','.join(p for m, at in by_module.items() for p in _spans(m, at))}")
        return " ".join(words)


def _spans(module: str, layers: list[int]) -> Iterable[str]:
    if not layers:
        yield module
    begin = 0
    for at, layer in enumerate(layers):
        if at + 1 == len(layers) or layers[at + 1] != layer + 1:
            first = layers[begin]
            yield f"{module}.{first}" if first == layer else f"{module}.{first}-{layer}"
            begin = at + 1


def _places(text: str, plan: str) -> list[tuple[str, int | None]]:
    found = _WHERE.fullmatch(text)
    if found is None or found[1] not in LINEARS | {"embed"}:
        raise _unknown(plan)
    if found[2] is None:
        return [(found[1], None)]
    first, last = int(found[2]), int(found[3] or found[2])
    if not first <= last < MAX_LAYERS:
        raise _unknown(plan)
    return [(found[1], layer) for layer in range(first, last + 1)]


def _format(text: str, plan: str) -> Format:
    if text in EIGHT_BITS or text == "none":
        return None if text == "none" else text
    found = _FOUR_BITS.fullmatch(text)
    if found is None:
        raise _unknown(plan)
    group = None if found[1] is None else int(found[1])
    if group is not None and not is_group(group):
        raise DeviceError(
            f"groups of 4-bit weights must be 16, 32, 64 or a multiple of 128 inputs, given: {group}"
        )
    return FourBits(group, found[2], found[3], found[4] is not None)


def is_group(size: int) -> bool:
    return size in (16, 32, 64) or (0 < size < 10**6 and size % 128 == 0)


def _unknown(plan: str) -> DeviceError:
    return DeviceError(f"unknown quant: `{plan:.80}`; supported: {', '.join(QUANTS)}")
