"""Turns prompts into tokens, and tokens into text, off the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from hearth.control.deploy.deployed import Deployed
from hearth.control.requests.generation import ChatPrompt, InfillPrompt, Prompt
from hearth.core.errors import BadCheckpoint, HearthError, ModelError, PromptTooLong
from hearth.core.types import GuideSpec
from hearth.store.format.manifest import check_texts, read_manifest
from hearth.text.grammar import check_guide
from hearth.text.infill import infill_tokens
from hearth.text.tokenizer import Tokenizer

#: The most tokenizers that are kept; one of 150,000 tokens takes some 50 MB.
MAX_TOKENIZERS = 32
#: Tokenizers that are read while a service starts. Reading one holds the interpreter for some tenths of a
#: second.
MAX_READ_AHEAD = 4
#: Threads that tokenise. The tokenizers package releases the interpreter meanwhile.
NUM_THREADS = 2

log = logging.getLogger(__name__)

T = TypeVar("T")


class PromptEncoder:
    """Mutable; used on the event loop alone, works on its own threads."""

    def __init__(self, template_s: float) -> None:
        self._template_s = template_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="hearth-encode")
        #: Tokenizers by digest of their model, the least recently used first; also those being read.
        self._tokenizers: OrderedDict[str, asyncio.Future[Tokenizer]] = OrderedDict()

    async def tokenizer(self, digest: str, directory: Path) -> Tokenizer:
        known = self._tokenizers.get(digest)
        if known is None:
            known = self._tokenizers[digest] = asyncio.ensure_future(self._load(digest, directory))
            known.add_done_callback(lambda loaded: self._forget_failed(digest, loaded))
            while len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(digest)
        return await asyncio.shield(known)  # a cancelled caller does not cancel it for others

    async def read_ahead(self, models: Iterable[Deployed], is_time: Callable[[], bool]) -> None:
        """Read tokenizers while `is_time`, except broken ones: the first request gets the error."""
        began_s, num_read = time.perf_counter(), 0
        for model in islice(models, MAX_READ_AHEAD):
            if not is_time():
                break
            with suppress(HearthError, OSError):
                await self.tokenizer(model.digest, Path(model.directory))
                num_read += 1
        if num_read:
            log.info("tokenizers_read num=%d seconds=%.3f", num_read, time.perf_counter() - began_s)

    async def encode(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        max_chars: int,
        add_special_tokens: bool | None = None,
    ) -> tuple[int, ...]:
        """Special tokens are added to a text, but not to a rendered template. Raises PromptTooLong."""
        match prompt:
            case ChatPrompt():
                is_added = add_special_tokens is True
                return await self._away(lambda: self._render(tokenizer, prompt, max_chars, is_added))
            case InfillPrompt(marks, prefix, suffix):
                _check_length(prefix + suffix, max_chars)
                return await self._away(lambda: infill_tokens(tokenizer, marks, prefix, suffix))
            case str():
                is_added = add_special_tokens is not False
                _check_length(prompt, max_chars)
                return await self._away(lambda: tuple(tokenizer.encode(prompt, is_added)))
            case _:
                return tuple(prompt)

    async def decode(self, tokenizer: Tokenizer, tokens: list[int]) -> str:
        return await self._away(lambda: tokenizer.decode(tokens, skip_special_tokens=False))

    async def check_guide(self, guide: GuideSpec) -> None:
        await self._away(lambda: check_guide(guide))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _render(
        self, tokenizer: Tokenizer, chat: ChatPrompt, max_chars: int, add_special_tokens: bool
    ) -> tuple[int, ...]:
        text = tokenizer.chat_text(
            chat.messages,
            chat.tools,
            chat.has_turn,
            continue_final_message=chat.is_continued,
            limit_s=self._template_s,
            **chat.extra,
        )
        _check_length(text, max_chars)
        return tuple(tokenizer.encode(text, add_special_tokens))

    def _forget_failed(self, digest: str, loaded: asyncio.Future[Tokenizer]) -> None:
        has_failed = loaded.cancelled() or loaded.exception() is not None
        if has_failed and self._tokenizers.get(digest) is loaded:
            del self._tokenizers[digest]

    async def _load(self, digest: str, directory: Path) -> Tokenizer:
        if not directory.is_dir():
            raise ModelError(f"the files of the model are gone from `{directory}`; deploy it again")
        return await self._away(lambda: _verified_tokenizer(digest, directory))

    async def _away(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _verified_tokenizer(digest: str, directory: Path) -> Tokenizer:
    """Read a tokenizer if its files are those that were deployed: other users may write there."""
    manifest = read_manifest(directory)
    if manifest.digest != digest:
        raise BadCheckpoint(
            f"`{directory}` was changed since it was deployed (manifest {manifest.digest}, deployed "
            f"{digest}); deploy it again"
        )
    check_texts(manifest, directory)
    return Tokenizer.load(directory)


def _check_length(text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise PromptTooLong(
            f"prompt has {len(text)} characters, which is more than the model's context can hold; at most "
            f"{max_chars} are tokenised; shorten the prompt"
        )
