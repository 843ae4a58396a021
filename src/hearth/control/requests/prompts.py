"""Prompts and texts as tokens of a model, for callers who may use it. Starts no request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hearth.control.deploy.catalog import CatalogEntry
from hearth.control.deploy.deployments import Deployments
from hearth.control.requests.caller import Caller
from hearth.control.requests.generation import ChatPrompt, Prompt
from hearth.control.requests.request_checks import check_prompt, check_vocabulary, max_chars
from hearth.control.requests.tokenization import PromptEncoder
from hearth.core.types import GuideSpec
from hearth.text.tokenizer import Tokenizer


class Prompts:
    """Used on the event loop alone; tokenises on the encoder's threads."""

    def __init__(self, deployments: Deployments, encoder: PromptEncoder) -> None:
        self._deployments, self._encoder = deployments, encoder

    async def tokenizer(self, name: str, caller: Caller) -> Tokenizer:
        return await self.tokenizer_of(self._deployments.find_for(name, caller))

    async def encode(
        self, name: str, prompt: Prompt, caller: Caller, max_tokens: int | None = None
    ) -> list[int]:
        entry = self._deployments.find_for(name, caller)
        return list(await self.encode_for(entry, prompt, max_tokens))

    async def tokenize(
        self, name: str, prompt: str | ChatPrompt, caller: Caller, add_special_tokens: bool | None
    ) -> list[int]:
        """`add_special_tokens` None: as in a prompt. Raises as `encode` does."""
        entry = self._deployments.find_for(name, caller)
        tokenizer = await self.tokenizer_of(entry)
        begun = _begun(entry, prompt)
        return list(await self._encoder.encode(tokenizer, begun, max_chars(entry), add_special_tokens))

    async def detokenize(self, name: str, tokens: list[int], caller: Caller) -> str:
        """Return the text of tokens, special ones included. Raises BadPrompt for an unknown token."""
        entry = self._deployments.find_for(name, caller)
        check_vocabulary(entry, tokens)
        return await self._encoder.decode(await self.tokenizer_of(entry), tokens)

    # For the gateway.

    async def tokenizer_of(self, entry: CatalogEntry) -> Tokenizer:
        tokenizer = await self._encoder.tokenizer(entry.deployed.digest, Path(entry.deployed.directory))
        template = None if entry.preset is None else entry.preset.preset.template
        return tokenizer if template is None else tokenizer.with_template(template)

    async def encode_for(
        self,
        entry: CatalogEntry,
        prompt: Prompt,
        max_tokens: int | None,
        follows: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        tokenizer = await self.tokenizer_of(entry)
        add_special_tokens = False if follows else None  # `follows` begins with them
        begun = prompt if follows else _begun(entry, prompt)
        tokens = follows + await self._encoder.encode(tokenizer, begun, max_chars(entry), add_special_tokens)
        check_prompt(entry, tokens, max_tokens)
        return tokens

    async def check_guide(self, guide: GuideSpec) -> None:
        await self._encoder.check_guide(guide)


def _begun(entry: CatalogEntry, prompt: Prompt) -> Prompt:
    if entry.preset is None or not isinstance(prompt, ChatPrompt):
        return prompt
    return replace(prompt, messages=entry.preset.preset.begun(prompt.messages))
