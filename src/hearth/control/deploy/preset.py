"""Presets: further names of a deployed model or adapter, with defaults of their own.

A preset shares the weights and replicas of its base: the catalog resolves its name to the entry of its
base, and the brain knows only that. Defaults apply where a request sets nothing: sampling parameters, the
system prompt, the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from hearth.core.types import SamplingParams

if TYPE_CHECKING:
    from hearth.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults of requests; None: there is none. Raises BadSampling."""

    system: str | None = None
    template: str | None = None  #: in Jinja, like a `chat_template.jinja`
    temperature: float | None = None  #: this and the next as in `SamplingParams`
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.params(SamplingParams())

    @property
    def sampling(self) -> dict[str, object]:
        return {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}

    def params(self, usual: SamplingParams, **given: float | None) -> SamplingParams:
        """Return `usual` with the preset's parameters, and over them those in `given` that are not None."""
        own = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        asked = {name: value for name, value in given.items() if value is not None}
        return replace(usual, **own | asked)

    def check(self) -> None:
        """Compile the template. Raises BadTokenizer."""
        from hearth.text.chat_template import DEFAULT, ChatTemplate  # not for commands that only list

        if self.template is not None:
            ChatTemplate({DEFAULT: self.template}, {}, "the preset (Jinja, and not Go as Ollama's)").check()

    def over(self, base: Preset) -> Preset:
        """Return the preset of the same effect for the base of `base`."""
        return Preset(
            **asdict(base) | {name: value for name, value in asdict(self).items() if value is not None}
        )

    def begun(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation with the system prompt, unless it has one of its own."""
        if self.system is None or (messages and messages[0].get("role") == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


SAMPLING = tuple(one.name for one in fields(Preset) if one.name not in ("system", "template"))


@dataclass(frozen=True, slots=True)
class DeployedPreset:
    name: str
    base: str  #: the model or adapter that answers
    preset: Preset
    created_at_s: float
