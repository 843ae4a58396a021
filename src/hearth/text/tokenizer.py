"""A model's tokenizer: text to tokens, tokens to text, messages to a prompt. Never truncates or pads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from hearth.core.errors import BadPrompt, BadTokenizer, HearthError
from hearth.core.model_files import MAX_TOKENIZER_BYTES, read_text
from hearth.text.chat_template import DEFAULT, RENDER_S, ChatTemplate, Json, Message
from hearth.text.token_spelling import SpelledTokens, fallback_byte, spelling_of
from hearth.text.tokenizer_settings import MAX_TOKEN_ID, ListedToken, Settings, read_settings

REPLACEMENT = "\ufffd"  #: what decoders put for bytes that are not UTF-8, or not yet


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Vocabulary:
    """The part of a tokenizer that models with equal files share: many are fine-tuned from one base."""

    backend: Backend
    special_ids: frozenset[int]
    spelled: SpelledTokens | None


#: By the digest of their files. Two threads may read the same one; either copy will do.
_vocabularies: WeakValueDictionary[bytes, Vocabulary] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Tokenizer:
    _vocabulary: Vocabulary = field(repr=False)  #: keeps it alive for other models
    _backend: Backend = field(repr=False)
    _chat_template: ChatTemplate | None
    _special_tokens: Mapping[str, str]  #: by role, for templates
    eos_ids: frozenset[int]  #: of all files of the model
    special_ids: frozenset[int]  #: what `decode` skips
    #: None: the text of a token depends on its neighbours
    spelled: SpelledTokens | None = field(repr=False)

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        settings = read_settings(directory)
        with _sound(f"{directory / 'tokenizer.json'} cannot be read"):
            vocabulary = _read_vocabulary(directory, settings)
        backend = vocabulary.backend
        return Tokenizer(
            _vocabulary=vocabulary,
            _backend=backend,
            _chat_template=settings.chat_template,
            _special_tokens=settings.special_tokens,
            eos_ids=frozenset([*_role_ids("eos_token", backend, settings), *settings.eos_ids]),
            special_ids=vocabulary.special_ids,
            spelled=vocabulary.spelled,
        )

    def check(self) -> None:
        """Raise BadTokenizer for broken ids or templates. Takes a second, so only deployments check."""
        with _sound("tokenizer.json is of no use"):
            with suppress(Exception):  # an unknown word fails the requests that contain it
                self._backend.decode(self._backend.encode("Hello").ids)
            largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=0)
        if largest > MAX_TOKEN_ID:
            raise BadTokenizer(
                f"tokenizer.json has a token id that is too large, limit: {MAX_TOKEN_ID}, given: {largest}"
            )
        if self._chat_template is not None:
            self._chat_template.check()

    def with_template(self, source: str) -> Tokenizer:
        """Return the tokenizer with another chat template, in Jinja."""
        return replace(self, _chat_template=ChatTemplate({DEFAULT: source}, self._special_tokens, "a preset"))

    @property
    def vocab_size(self) -> int:
        """Includes added tokens; the model's own vocabulary may be padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def chat_template_text(self) -> str | None:
        return None if self._chat_template is None else self._chat_template.text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with _sound("the model's tokenizer.json cannot encode the prompt"):
            try:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except TypeError as error:
                raise BadPrompt(
                    f"a prompt must be valid Unicode, given: {type(text).__name__} with {ascii(text)[:80]}; "
                    "send no lone surrogates"
                ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return a token's vocabulary entry, which is not its text; None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def has_token(self, text: str) -> bool:
        return self._backend.token_to_id(text) is not None

    def token_id(self, text: str) -> int:
        """Return the id of a vocabulary entry that the tokenizer has."""
        token_id = self._backend.token_to_id(text)
        assert token_id is not None, f"no token {text!r}"
        return token_id

    def is_special(self, text: str) -> bool:
        """Return True for the text of one special token, which answers do not show unless asked to."""
        return self._backend.token_to_id(text) in self.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; empty outside the vocabulary."""
        name = self.token(token_id)
        if name is None:
            return b""
        if self.spelled is not None and token_id not in self.special_ids:
            return self.spelled[token_id]
        alone = self.decode([token_id], skip_special_tokens=False)
        if alone == REPLACEMENT and (byte := fallback_byte(name)) is not None:
            return byte
        if token_id in self.special_ids:
            return alone.encode()
        # After itself, because the first token of a text may lose its space.
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(alone) :].encode()

    def chat_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        limit_s: float = RENDER_S,
        **extra: Json,
    ) -> str:
        """`extra`: further variables. Tools and calls that the template does not support become text."""
        if self._chat_template is None:
            raise BadPrompt(
                "this model has no chat template; send a plain prompt, or add a `chat_template.jinja` to the "
                "model's directory"
            )
        return self._chat_template.render(
            self._chat_template.in_words(messages, tools),
            tools,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            limit_s=limit_s,
            **extra,
        )

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of `chat_text`; special tokens are those that the template writes."""
        return self.encode(self.chat_text(messages), add_special_tokens=False)


_OLD_FILES = {"merges.txt", "spiece.model", "tekken.json", "vocab.json", "vocab.txt"}


def _read_vocabulary(directory: Path, settings: Settings) -> Vocabulary:
    content = _read_tokenizer(directory)
    said = repr((sorted(settings.special_tokens.items()), settings.listed_tokens))
    key = hashlib.blake2b(f"{said}\n{content}".encode(), digest_size=32).digest()
    if (known := _vocabularies.get(key)) is not None:
        return known
    backend = Backend.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    _add_listed_tokens(backend, settings, directory)
    _mark_special_tokens(backend, settings)
    added, spelling = backend.get_added_tokens_decoder(), spelling_of(_decoder_section(backend))
    new = _vocabularies[key] = Vocabulary(
        backend,
        frozenset(token_id for token_id, token in added.items() if token.special),
        None if spelling is None else SpelledTokens(spelling, backend.id_to_token),
    )
    return new


def _read_tokenizer(directory: Path) -> str:
    try:
        return read_text(directory / "tokenizer.json", MAX_TOKENIZER_BYTES, BadTokenizer)
    except FileNotFoundError:
        found = sorted(p.name for p in directory.glob("*") if "tokenizer" in p.name or p.name in _OLD_FILES)
        raise BadTokenizer(
            f"no `tokenizer.json` in {directory}, tokenizer files there: {', '.join(found) or 'none'}; "
            "make one with `transformers.AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)`"
        ) from None


@contextmanager
def _sound(what: str) -> Iterator[None]:
    """Raise BadTokenizer for exceptions of the tokenizers package and panics of Rust."""
    try:
        yield
    except HearthError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadTokenizer(f"{what}: {error!s:.200}; download or convert it again") from error


def _add_listed_tokens(backend: Backend, settings: Settings, directory: Path) -> None:
    """Add tokens that only tokenizer_config.json lists, or lists as special."""
    known = backend.get_added_tokens_decoder()
    new = [t for t in settings.listed_tokens if not _is_known(t, known.get(t.token_id))]
    backend.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token in new
        ]
    )
    for token in new:
        if (given := backend.token_to_id(token.content)) != token.token_id:
            raise BadTokenizer(
                f"`{token.content}` has id {token.token_id} in {directory / 'tokenizer_config.json'}, "
                f"but `tokenizer.json` gives it id {given}; take both files from the same model"
            )


def _is_known(listed: ListedToken, known: AddedToken | None) -> bool:
    return known is not None and known.content == listed.content and known.special >= listed.special


def _mark_special_tokens(backend: Backend, settings: Settings) -> None:
    """Mark vocabulary entries with a role (`eos_token`, ...) as special. Adds no entries."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = [content for content in sorted(set(settings.special_tokens.values())) if content not in added]
    backend.add_special_tokens([content for content in plain if backend.token_to_id(content) is not None])


def _role_ids(role: str, backend: Backend, settings: Settings) -> list[int]:
    content = settings.special_tokens.get(role)
    token_id = None if content is None else backend.token_to_id(content)
    return [] if token_id is None else [token_id]


def _decoder_section(backend: Backend) -> Json:
    if backend.decoder is None:
        return None
    section: Json = json.loads(backend.decoder.__getstate__())
    return section
