"""Reads the JSON files beside tokenizer.json: special tokens, ids that end an output, chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hearth.core.errors import BadTokenizer
from hearth.core.model_files import MAX_TEMPLATE_BYTES, brief, read_object, read_text
from hearth.text.chat_template import DEFAULT, ChatTemplate

#: The largest token id that is believed: whoever guides an output makes a table of them.
MAX_TOKEN_ID = 2**22 - 1
#: The most ids that a file may name as the end of an output.
MAX_END_IDS = 256


@dataclass(frozen=True, slots=True)
class ListedToken:
    token_id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True, slots=True)
class Settings:
    special_tokens: Mapping[str, str]  #: by role: `bos_token`, `eos_token`, `pad_token`, ...
    listed_tokens: tuple[ListedToken, ...]  #: by ascending id
    eos_ids: tuple[int, ...]
    chat_template: ChatTemplate | None


def read_settings(directory: Path) -> Settings:
    path = directory / "tokenizer_config.json"
    config = _read_object(path)
    special_tokens = _special_tokens(config)
    model_files = [directory / "generation_config.json", directory / "config.json"]
    return Settings(
        special_tokens=special_tokens,
        listed_tokens=_listed_tokens(config, path),
        eos_ids=tuple(i for file in model_files for i in _end_ids(file)),
        chat_template=_chat_template(directory, config, special_tokens),
    )


def _read_object(path: Path) -> Mapping[str, object]:
    try:
        return read_object(path, BadTokenizer)
    except FileNotFoundError:
        return {}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {}
    for role, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(content, str):
            tokens[role] = content
    return tokens


def _listed_tokens(config: Mapping[str, object], path: Path) -> tuple[ListedToken, ...]:
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return ()
    if not isinstance(listed, Mapping):
        raise BadTokenizer(f"`added_tokens_decoder` in {path} must be an object, found: {brief(listed)}")
    tokens = [_listed_token(token_id, entry, path) for token_id, entry in listed.items()]
    return tuple(sorted(tokens, key=lambda token: token.token_id))


def _listed_token(token_id: str, entry: object, path: Path) -> ListedToken:
    content = entry.get("content") if isinstance(entry, Mapping) else None
    is_id = token_id.isdecimal() and len(token_id) <= 10 and int(token_id) <= MAX_TOKEN_ID
    if not isinstance(entry, Mapping) or not isinstance(content, str) or not is_id:
        raise BadTokenizer(
            f"`added_tokens_decoder` in {path} must map ids up to {MAX_TOKEN_ID} to objects with `content`, "
            f"found: {brief(token_id)}: {brief(entry)}; download the file again"
        )
    return ListedToken(
        token_id=int(token_id),
        content=content,
        special=bool(entry.get("special")),
        single_word=bool(entry.get("single_word")),
        lstrip=bool(entry.get("lstrip")),
        rstrip=bool(entry.get("rstrip")),
        normalized=bool(entry.get("normalized")),
    )


def _end_ids(path: Path) -> list[int]:
    value = _read_object(path).get("eos_token_id")
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    ids = [i for i in values if isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_TOKEN_ID]
    if len(ids) != len(values) or len(ids) > MAX_END_IDS:
        raise BadTokenizer(
            f"`eos_token_id` in {path} must be an id up to {MAX_TOKEN_ID}, or a list of at most "
            f"{MAX_END_IDS} ids, found: {brief(value)}"
        )
    return ids


def _chat_template(
    directory: Path, config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    try:
        source = read_text(path, MAX_TEMPLATE_BYTES, BadTokenizer)
    except FileNotFoundError:
        pass
    else:
        return ChatTemplate({DEFAULT: source}, special_tokens, str(path))
    path = directory / "tokenizer_config.json"
    match config.get("chat_template"):
        case None:
            return None
        case str(source):
            return ChatTemplate({DEFAULT: source}, special_tokens, str(path))
        case [*entries]:
            return ChatTemplate(_named_templates(entries, path), special_tokens, str(path))
        case other:
            raise BadTokenizer(
                f"`chat_template` in {path} must be a string or a list of named ones, found: {brief(other)}"
            )


def _named_templates(entries: Sequence[object], path: Path) -> dict[str, str]:
    templates = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                templates[name] = source
            case _:
                raise BadTokenizer(
                    f"each `chat_template` in {path} needs a `name` and a `template`, found: {brief(entry)}"
                )
    return templates
