"""GGUF metadata as the files of a Hugging Face tokenizer. Tokenises nothing and reads no tensors.

llama.cpp's own reading of the metadata is the measure: what the tokenizer built here does to a text is what
llama.cpp does to it with `parse_special`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hearth.core.errors import BadTokenizer
from hearth.models.config_fields import Fields

_PREFIX = "tokenizer.ggml."
#: Kinds of tokens, by `tokenizer.ggml.token_type`; plain ones, bytes and unused ones need no treatment.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

#: Limits of a SentencePiece vocabulary, whose merges are all ways to cut a token in two that are tokens: the
#: longest token, in characters, and the number of merges. Those of the largest models are a quarter of them.
_MAX_PIECE, _MAX_MERGES = 512, 1 << 21

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
#: Tokens that end an output: of the text, of a turn, of a message that calls a tool.
_ENDS = ("eos", "eot", "eom")
#: Special tokens that end a turn also where the file names no such token, as for llama.cpp.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class _Splitter:
    patterns: tuple[str, ...]  #: each cuts what the one before it has left
    ignores_merges: bool = False  #: a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  #: prompts begin with it where the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT4O_CASES = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(after_word: str, numbers: str) -> str:
    """Return the pattern of GPT-4o and Tekken: a word ends before a capital that follows a small letter."""
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{case}{after_word}" for case in _GPT4O_CASES)
    return f"{words}|{numbers}{_SLASH_TAIL}"


_LLAMA3 = _Splitter((_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _TAIL,), ignores_merges=True, adds_bos=True)
_QWEN2 = _Splitter((_CONTRACTIONS + _WORDS + r"\p{N}" + _TAIL,))

_GPT2_SPLITTER = _Splitter((_GPT2,))
_DIGITS = _Splitter((r"\p{N}", _GPT2))
_LIKE_LLAMA3 = _Splitter(_LLAMA3.patterns)

_SPLITTERS: Mapping[str, _Splitter] = {
    "default": _Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_SPLITTER,
    "olmo": _GPT2_SPLITTER,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "dbrx": _LIKE_LLAMA3,
    "smaug-bpe": _LIKE_LLAMA3,
    "glm4": _LIKE_LLAMA3,
    "chatglm-bpe": _LIKE_LLAMA3,
    "gpt-4o": _Splitter((_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}"),)),
    "tekken": _Splitter((_by_case("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    ids: Mapping[str, int]
    special: Sequence[str]  #: matched whole in the text, and not part of an output's text
    added: Sequence[str]  #: matched whole in the text, and part of it
    roles: Mapping[str, int] = field(default_factory=dict)  #: GGUF's names, `bos`, `eos`, ...


@dataclass(frozen=True, slots=True)
class _Kind:
    build: Callable[[Fields, _Vocabulary], Tokenizer]
    default_roles: Mapping[str, int] = field(default_factory=dict)


def text_files(metadata: Fields) -> dict[str, bytes]:
    name = metadata.text(_PREFIX + "model")
    if name not in _KINDS:
        raise BadTokenizer(
            f"{metadata.where}: `{_PREFIX}model` is {name!r:.80}; supported: {', '.join(_KINDS)}; "
            "convert the model from its Hugging Face directory"
        )
    kind = _KINDS[name]
    vocabulary = _vocabulary(metadata, kind.default_roles)
    roles = vocabulary.roles
    backend = kind.build(metadata, vocabulary)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in vocabulary.special])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in vocabulary.added])
    tokens = {role: vocabulary.tokens[roles[key]] for role, key in _ROLES.items() if key in roles}
    config = {role: token for role, token in tokens.items() if token in vocabulary.special}
    named = _TURN_ENDS if "eot" not in roles else ()
    turn_ends = [vocabulary.ids[end] for end in named if end in vocabulary.special]
    generation = {
        "bos_token_id": roles.get("bos"),
        "eos_token_id": sorted({*(roles[end] for end in _ENDS if end in roles), *turn_ends}),
    }
    files = {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}),
        "generation_config.json": json.dumps(generation),
    }
    if metadata.has("tokenizer.chat_template"):
        files["chat_template.jinja"] = metadata.text("tokenizer.chat_template")
    return {file: text.encode() for file, text in files.items()}


def _byte_level(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    splitter = _splitter(metadata)
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=_stored_merges(metadata, vocabulary.ids),
        ignore_merges=splitter.ignores_merges,
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, metadata, vocabulary, adds_bos=splitter.adds_bos)
    return backend


def _sentence_piece(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    """Build a SentencePiece tokenizer; a space precedes all text between special tokens, as in llama.cpp."""
    unknown = vocabulary.roles.get("unknown")
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=_scored_merges(metadata, vocabulary),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    has_prefix = _flag(metadata, "add_space_prefix", default=True)
    escape, unescape = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    strip = [decoders.Strip(content=" ", left=1, right=0)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape] if has_prefix else [escape])
    backend.decoder = decoders.Sequence([unescape, decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add_ends(backend, metadata, vocabulary, adds_bos=True)
    return backend


_KINDS: Mapping[str, _Kind] = {
    "gpt2": _Kind(_byte_level),
    "llama": _Kind(_sentence_piece, default_roles={"unknown": 0, "bos": 1, "eos": 2}),
}


def _vocabulary(metadata: Fields, default_roles: Mapping[str, int]) -> _Vocabulary:
    tokens = _texts(metadata, "tokens")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise BadTokenizer(
            f"{metadata.where}: `{_PREFIX}tokens` has {twice!r:.80} twice; convert the model again"
        )
    roles = _roles(metadata, default_roles, len(tokens))
    kinds = _numbers(metadata, "token_type", len(tokens)) if metadata.has(_PREFIX + "token_type") else []
    ends = {roles[name] for name in ("bos", *_ENDS) if name in roles}
    special = {i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)} | ends
    added = {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED} - special
    return _Vocabulary(
        tokens, ids, [tokens[i] for i in sorted(special)], [tokens[i] for i in sorted(added)], roles
    )


def _roles(metadata: Fields, defaults: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    roles = {name: i for name, i in defaults.items() if i < num_tokens}
    for name in {*_ROLES.values(), *_ENDS}:
        key = f"{_PREFIX}{name}_token_id"
        if metadata.has(key):
            roles[name] = metadata.integer(key, least=0)
            if roles[name] >= num_tokens:
                raise BadTokenizer(
                    f"{metadata.where}: `{key}` must be below the number of tokens, {num_tokens}, "
                    f"given: {roles[name]}; convert the model again"
                )
    return roles


def _splitter(metadata: Fields) -> _Splitter:
    key = _PREFIX + "pre"
    name = metadata.text(key) if metadata.has(key) else "default"
    if name not in _SPLITTERS:
        raise BadTokenizer(
            f"{metadata.where}: `{key}` is {name!r:.80}; supported: {', '.join(_SPLITTERS)}; "
            "convert the model from its Hugging Face directory"
        )
    return _SPLITTERS[name]


def _stored_merges(metadata: Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for rank, merge in enumerate(_texts(metadata, "merges")):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise BadTokenizer(
                f"{metadata.where}: `{_PREFIX}merges` has {merge!r:.80} at {rank}, which does not make a "
                "token of two tokens; convert the model again"
            )
        merges.append((left, right))
    return merges


def _scored_merges(metadata: Fields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, best score first: SentencePiece stores scores only."""
    ids, scores = vocabulary.ids, _numbers(metadata, "scores", len(vocabulary.tokens))
    longest = max(map(len, vocabulary.tokens), default=0)
    if longest > _MAX_PIECE:
        raise BadTokenizer(
            f"{metadata.where}: `{_PREFIX}tokens` has a token that is too long, limit: {_MAX_PIECE} "
            f"characters, given: {longest}; convert the model again"
        )
    merges: list[tuple[str, str]] = []
    for token in vocabulary.tokens:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += ((left, right) for left, right in cuts if left in ids and right in ids)
        if len(merges) > _MAX_MERGES:
            raise BadTokenizer(
                f"{metadata.where}: `{_PREFIX}tokens` can be merged in too many ways, limit: {_MAX_MERGES}; "
                "convert the model again"
            )
    return sorted(merges, key=lambda pair: (-scores[ids[pair[0] + pair[1]]], -len(pair[0])))


def _add_ends(backend: Tokenizer, metadata: Fields, vocabulary: _Vocabulary, *, adds_bos: bool) -> None:
    wanted = {
        "bos": _flag(metadata, "add_bos_token", default=adds_bos),
        "eos": _flag(metadata, "add_eos_token", default=False),
    }
    ids = {}
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        if name not in vocabulary.roles:
            raise BadTokenizer(
                f"{metadata.where}: prompts get a {name} token, but `{_PREFIX}{name}_token_id` is not set; "
                "convert the model again"
            )
        ids[name] = vocabulary.roles[name]
    if ids:
        tokens = {name: vocabulary.tokens[i] for name, i in ids.items()}
        template = [*(tokens[n] for n in ids if n == "bos"), "$A", *(tokens[n] for n in ids if n == "eos")]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(tokens[name], i) for name, i in ids.items()]
        )


def _flag(metadata: Fields, name: str, *, default: bool) -> bool:
    return metadata.flag(_PREFIX + name) if metadata.has(_PREFIX + name) else default


def _texts(metadata: Fields, name: str) -> list[str]:
    texts = metadata.texts(_PREFIX + name)
    if texts is None:
        raise BadTokenizer(f"{metadata.where} has no `{_PREFIX}{name}`; convert the model with its tokenizer")
    return texts


def _numbers(metadata: Fields, name: str, num_tokens: int) -> list[float]:
    values = metadata.values.get(_PREFIX + name)
    numbers = [v for v in values if isinstance(v, int | float)] if isinstance(values, list) else []
    if len(numbers) != num_tokens:
        raise BadTokenizer(
            f"{metadata.where}: `{_PREFIX}{name}` must have one number per token, {num_tokens}, "
            f"given: {len(numbers)}; convert the model again"
        )
    return numbers
