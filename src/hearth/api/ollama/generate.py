"""The body of POST /api/generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from hearth.api.body import Text, TokenId
from hearth.api.json_body import MAX_VALUES
from hearth.api.ollama.body import DEFAULT_SAMPLING, OllamaBody
from hearth.api.ollama.chat import InnerChatBody
from hearth.api.openai.chat import ChatBody, MessageBody
from hearth.api.openai.completion import CompletionBody
from hearth.core.errors import BadPrompt


class UnlimitedCompletionBody(CompletionBody):
    """A completion with Ollama's defaults, up to the end of the context."""

    default_max_tokens: ClassVar[int | None] = None
    default_sampling: ClassVar[Mapping[str, float]] = DEFAULT_SAMPLING


class GenerateBody(OllamaBody):
    """An empty prompt loads or unloads the model."""

    prompt: Text | None = None
    system: Text | None = Field(None, description="What the model is told before the prompt.")
    suffix: Text | None = Field(
        None, description="The text after the answer; for models whose tokenizer can fill in the middle."
    )
    raw: bool | None = Field(None, description="The prompt is as the model is to see it, without a template.")
    context: list[TokenId] | None = Field(
        None,
        fail_fast=True,
        max_length=MAX_VALUES,
        description="The `context` of an earlier answer, which this prompt follows.",
    )

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    @property
    def is_whole(self) -> bool:
        """True if the prompt is sent to the model without a template."""
        return bool(self.raw or self.suffix)

    def chat_body(self) -> ChatBody:
        system = [MessageBody(role="system", content=self.system)] if self.system else []
        messages = [*system, MessageBody(role="user", content=self.prompt)]
        fields = {"messages": messages, **self.thinking_fields()}
        return InnerChatBody.model_validate(self.inner_fields() | fields)

    def raw_body(self) -> CompletionBody:
        if self.is_whole and (self.system or self.context):
            name, given = "raw" if self.raw else "suffix", "system" if self.system else "context"
            raise BadPrompt(f"`{name}` takes a prompt that is whole, and no `{given}`; leave one of them out")
        prompt = "\n\n".join(part for part in (self.system, self.prompt) if part)
        fields = {"prompt": prompt, "suffix": self.suffix}
        return UnlimitedCompletionBody.model_validate(self.inner_fields() | fields)
