"""The names that models and adapters may have, and which of them a request means.

Comparing two names well takes tens of microseconds on the event loop. So each name has a bit set of its
pairs of characters: differing bits are counted in a fraction of a microsecond, and only the nearest few names
are compared well.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise

from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.preset import DeployedPreset
from hearth.core.config import ModelConfig
from hearth.core.errors import ConfigError, HasAdapters, RequestError, UnknownModel

#: Parts as hubs have them, `org/name:tag`. What begins with `hf:` would be a source.
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"(?!hf:){_PART}([/:]{_PART})*", re.ASCII)
MAX_NAME_CHARS = 128
#: The tag of a name that has none, as users of Ollama write it.
LATEST = ":latest"
MAX_LISTED = 10


def check_name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None or ".." in name:
        raise RequestError(
            f"a name is 1 to {MAX_NAME_CHARS} letters, digits, `.`, `_` or `-`, in parts between `/` or `:` "
            "that begin with a letter or digit, without two dots in a row or `hf:` at its beginning, given: "
            f"{name!r:.80}"
        )
    return name


def file_name(name: str) -> str:
    """Return the name of a model as a file name. Several models may share one."""
    return re.sub("[/:]", "--", check_name(name))


class Names:
    def __init__(
        self,
        deployed: Iterable[Deployed | DeployedAdapter | DeployedPreset],
        models: Mapping[str, ModelConfig],
    ) -> None:
        """Settings of models that are not deployed yet are kept. Raises ConfigError."""
        self._by_name = {model.name: model for model in deployed}
        self._models = models
        self._name_by_alias: dict[str, str] = {}
        for name, config in models.items():
            _check_table(name)
            for alias in config.aliases:
                is_own = alias in self._by_name or alias in models
                other = alias if is_own else self._name_by_alias.get(alias, name)
                if other != name:
                    raise ConfigError(
                        f"the alias `{alias}` of model `{name}` means model `{other}` too; give it to one"
                    )
                self._name_by_alias[alias] = name

    def resolve(
        self, name: str, allowed: Collection[str] | None = None
    ) -> Deployed | DeployedAdapter | DeployedPreset:
        """`allowed` None: all. Raises UnknownModel, in the same words for names that are not allowed."""
        found = self._by_name.get(self._own_name(name))
        if allowed is not None and (found is None or found.name not in self.allowed(allowed)):
            raise self._unknown_among(name, self.allowed(allowed))
        if found is None:
            raise self.unknown(name)
        return found

    def allowed(self, allowed: Collection[str]) -> set[str]:
        return {self._own_name(one) for one in allowed} & self._by_name.keys()

    def waiting(self) -> dict[str, str]:
        """Return a hint for each name that has settings, but neither a model nor a `source`."""
        declared = {name for name, config in self._models.items() if config.source is not None}
        return {name: self._hint(name) for name in self._models if name not in {*self._by_name, *declared}}

    def unknown(self, name: str) -> UnknownModel:
        return UnknownModel(f"no model named `{name:.80}`; {self._hint(name)}")

    def _own_name(self, name: str) -> str:
        for spelt in (name, name.removesuffix(LATEST), name + LATEST):
            if (own := self._name_by_alias.get(spelt, spelt)) in self._by_name:
                return own
        return name

    def _unknown_among(self, name: str, allowed: Collection[str]) -> UnknownModel:
        aliases = (alias for alias, one in self._name_by_alias.items() if one in allowed)
        known = sorted({*allowed, *aliases})
        return UnknownModel(
            f"no model named `{name:.80}`; {_describe_known(name, known, NearestName(known))}"
        )

    def _hint(self, name: str) -> str:
        return _describe_known(name, self._known, self._nearest)

    # Made when the first unknown name is asked for, and kept: many may follow.

    @cached_property
    def _known(self) -> list[str]:
        aliases = (alias for alias, name in self._name_by_alias.items() if name in self._by_name)
        return sorted({*self._by_name, *aliases})

    @cached_property
    def _nearest(self) -> NearestName:
        return NearestName(self._known)


def has_dependents(name: str, adapters: Collection[str], presets: Collection[str]) -> HasAdapters:
    what = " and ".join(["adapters"] * bool(adapters) + ["presets"] * bool(presets))
    return HasAdapters(
        f"`{name}` has {what}, which are nothing without it: {listed([*adapters, *presets])}; remove them "
        "first, or together with it: `hearth rm --with-adapters`, `?with_adapters=true`"
    )


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")


def _describe_known(name: str, known: Sequence[str], nearest: NearestName) -> str:
    if (meant := nearest.find(name)) is not None:
        return f"did you mean `{meant}`?"
    if not known:
        return "nothing is deployed yet; deploy a directory, GGUF file or hf:ORG/NAME by `hearth deploy`"
    return f"deployed: {listed(known)}"


def _check_table(name: str) -> None:
    try:
        check_name(name)
    except RequestError as error:
        raise ConfigError(f"invalid settings in [models.{name:.80}]: {error}") from error


#: The most names that are compared well.
MAX_COMPARED = 8
#: The most characters of a given name that are looked at.
_MAX_GIVEN = 128
#: Pairs of characters share this many places.
_NUM_PLACES = 256


class NearestName:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = [(_pairs(name), name) for name in names]

    def find(self, given: str) -> str | None:
        given = given[:_MAX_GIVEN]
        pairs = _pairs(given)
        likely = heapq.nsmallest(MAX_COMPARED, self._names, key=lambda entry: (entry[0] ^ pairs).bit_count())
        return next(iter(get_close_matches(given, [name for _, name in likely], n=1)), None)


def _pairs(name: str) -> int:
    """Return a bit set of the pairs of neighbouring characters; a space stands before and after the name."""
    places = bytearray(_NUM_PLACES)
    for one, other in pairwise(b" %b " % name.encode(errors="replace")):
        places[(31 * one + other) % _NUM_PLACES] = 1
    return int.from_bytes(places)
