from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.api import answer as answer_module
from hearth.control.requests.generation import AnswerStream, InfillPrompt
from hearth.core.types import FinishReason, PromptLogprobs, PromptReading, TokenLogprobs
from hearth.text.detokenizer import prompt_text
from hearth.text.infill import MARKS
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import complete, events
from tests.api.fake import FakeGateway, tokens_of, with_logprobs
from tests.text.conftest import byte_level


def test_an_answer_has_the_shape_of_openais(gateway: FakeGateway) -> None:
    answer = complete(gateway).json()

    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-r0", "text_completion", "tiny")
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["total_tokens"] == 7
    assert gateway.requests[0].sampling.max_tokens == 16


def test_both_names_of_the_limit_are_read(gateway: FakeGateway) -> None:
    for limits in (
        {"max_tokens": 3},
        {"max_completion_tokens": 4},
        {"max_tokens": 3, "max_completion_tokens": 4},
    ):
        complete(gateway, **limits)

    assert [request.sampling.max_tokens for request in gateway.requests] == [3, 4, 4]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several(gateway: FakeGateway, prompt: object, asked: object) -> None:
    complete(gateway, prompt=prompt)
    assert [request.prompt for request in gateway.requests] == asked
    assert gateway.encoded == []  # which is the gateway's own task then


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"], [[1, 2], [3]]])
def test_several_answers_to_a_prompt_share_its_tokens(gateway: FakeGateway, prompt: object) -> None:
    response = complete(gateway, prompt=prompt, n=2)

    assert gateway.encoded == (prompt if isinstance(prompt, list) else [prompt])
    assert all(isinstance(request.prompt, list) for request in gateway.requests)
    assert response.json()["usage"]["prompt_tokens"] == 5 * len(gateway.requests[::2])
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(gateway.requests)))


def test_echo_puts_the_prompt_first(gateway: FakeGateway) -> None:
    tokens = gateway.tokenizer_.encode("The house")

    whole = complete(gateway, prompt=["Hi ", "Ho "], echo=True).json()
    streamed = events(complete(gateway, prompt=tokens, echo=True, stream=True))

    assert [choice["text"] for choice in whole["choices"]] == ["Hi Hello", "Ho Hello"]
    texts = [chunk["choices"][0]["text"] for chunk in streamed]  # type: ignore[index]
    assert texts == ["The house", "Hel", "lo", ""]


def test_an_echo_leaves_half_a_character_to_the_answer_that_completes_it(gateway: FakeGateway) -> None:
    tokens = gateway.tokenizer_.encode("a鬱")
    gateway.script = lambda stream: stream.put(tokens_of("鬱", tokens=tokens[-1:]))

    (choice,) = complete(gateway, prompt=tokens[:-1], echo=True).json()["choices"]

    assert choice["text"] == "a鬱"


def test_an_echo_shows_the_special_tokens_that_the_answer_shows(gateway: FakeGateway) -> None:
    tokens = gateway.tokenizer_.encode("<s>The house")

    texts = [
        complete(gateway, prompt=tokens, echo=True, skip_special_tokens=skip).json()["choices"][0]["text"]
        for skip in (True, False)
    ]

    assert texts == ["The houseHello", "<s>The houseHello"]


def test_a_long_prompt_is_echoed_once_for_all_its_answers(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = gateway.tokenizer_.encode("The house " * 500)
    threads: list[threading.Thread] = []

    def read(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> str:
        threads.append(threading.current_thread())
        return prompt_text(tokenizer, prompt, skip_special_tokens)

    monkeypatch.setattr(answer_module, "prompt_text", read)
    answer = complete(gateway, prompt=[tokens, tokens[:2]], n=3, echo=True).json()

    assert [choice["text"][:4] for choice in answer["choices"][::3]] == [
        "The ",
        answer["choices"][3]["text"][:4],
    ]
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


def test_logprobs_come_with_offsets(gateway: FakeGateway) -> None:
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of("ab", "cd")))

    (choice,) = complete(gateway, logprobs=2).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in events(complete(gateway, logprobs=2, stream=True))]  # type: ignore[index]

    logprobs = choice["logprobs"]
    first, second = (gateway.tokenizer_.decode([token]) for token in (300, 301))
    assert logprobs["tokens"] == [first, second]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 2]
    assert logprobs["top_logprobs"][0][second] == -0.25
    assert logprobs["top_logprobs"][0][first] == -0.5
    offsets = [chunk["logprobs"] and chunk["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [2], None]


def test_halves_of_characters_have_names_of_their_own(gateway: FakeGateway) -> None:
    (half,) = (i for i in range(300) if gateway.tokenizer_.token(i) == "ð")  # the byte 0xf0
    gateway.script = lambda stream: stream.put(with_logprobs(tokens_of("", tokens=[half])))

    (choice,) = complete(gateway, logprobs=0).json()["choices"]

    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0"]


def test_a_stream_tells_pieces_and_reason(gateway: FakeGateway) -> None:
    chunks = events(complete(gateway, stream=True))

    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("Hel", None), ("lo", None), ("", "stop")]
    ]
    assert "usage" not in chunks[0]


def scores(num_tokens: int, num_top: int) -> PromptReading:
    """Logprobs of -1, -2, ... for the second token and those that follow; token 301 is the most likely."""
    own = array("f", [-1.0 - at for at in range(num_tokens - 1)])
    ranks = array("i", range(2, num_tokens + 1))
    top_ids = array("i", [301 + at for _ in own for at in range(num_top)])
    top = array("f", [-0.5 - at for _ in own for at in range(num_top)])
    columns = (own.tobytes(), ranks.tobytes(), top_ids.tobytes(), top.tobytes())
    return PromptReading(logprobs=PromptLogprobs(num_top, *columns))


def read_first(gateway: FakeGateway, num_top: int, then: Callable[[AnswerStream], None]) -> None:
    """Have prompts be read where that is asked for."""

    def script(stream: AnswerStream) -> None:
        if gateway.requests[len(gateway.streams) - 1].sampling.prompt_logprobs is not None:
            stream.reading = scores(len(stream.prompt), num_top)
        then(stream)

    gateway.script = script


def test_an_echo_with_logprobs_begins_with_those_of_the_prompt(gateway: FakeGateway) -> None:
    """As in OpenAI's legacy completions: of the first token nothing is known."""
    tokens = gateway.tokenizer_.encode("Hé?")
    read_first(
        gateway,
        1,
        lambda stream: stream.put(with_logprobs(tokens_of("Hel", "lo", finish=FinishReason.LENGTH))),
    )
    (choice,) = complete(gateway, prompt=tokens, echo=True, logprobs=1).json()["choices"]

    name = {
        token: gateway.tokenizer_.token_bytes(token).decode(errors="replace") for token in (301, tokens[0])
    }
    assert choice["text"] == "Hé?Hello"
    told = choice["logprobs"]
    assert [len(column) for column in told.values()] == [len(tokens) + 2] * 4
    assert told["tokens"][:2] == [name[tokens[0]], told["tokens"][1]]
    assert told["token_logprobs"] == [None, *(-1.0 - at for at in range(len(tokens) - 1)), -0.5, -0.5]
    assert told["top_logprobs"][0] is None
    assert told["top_logprobs"][1] == {name[301]: -0.5, told["tokens"][1]: -1.0}
    assert told["text_offset"][-3:] == [2, 3, 6]
    assert gateway.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"logprobs": 0}, {}])
def test_a_prompt_alone_can_be_echoed_without_an_answer(
    gateway: FakeGateway, fields: dict[str, object]
) -> None:
    read_first(gateway, 1, lambda stream: stream.end(FinishReason.LENGTH))
    answer = complete(
        gateway, prompt=gateway.tokenizer_.encode("Hey"), echo=True, max_tokens=0, **fields
    ).json()

    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hey", "length")
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert gateway.requests[0].sampling.max_tokens == 0
    if fields:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert [len(best) for best in choice["logprobs"]["top_logprobs"][1:]] == [
            1 + bool(fields["logprobs"])
        ] * 2
    else:
        assert choice["logprobs"] is None


def test_prompt_logprobs_are_told_as_vllm_does_and_computed_once_for_all_answers(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "MANY_BYTES", 0)  # spelt on another thread
    read_first(gateway, 2, lambda stream: stream.put(tokens_of("Hel", "lo")))
    tokens = [1, 2, 3]
    choices = complete(gateway, prompt=tokens, n=2, prompt_logprobs=2).json()["choices"]

    tell = gateway.tokenizer_.token_bytes
    monkeypatch.undo()
    for choice in choices:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert {token: (one["logprob"], one["rank"]) for token, one in second.items()} == {
            "2": (-1.0, 2),
            "301": (-0.5, 1),
            "302": (-1.5, 2),
        }
        assert third["3"] == {"logprob": -2.0, "rank": 3, "decoded_token": tell(3).decode(errors="replace")}
    assert [one.sampling.prompt_logprobs for one in gateway.requests] == [2, None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "end"}, "the tokenizer of `tiny` has no token for it: `<|fim_prefix|>`"),
        ({"suffix": "end", "echo": True}, "`suffix` and `echo` cannot be combined"),
        ({"n": 3, "best_of": 2}, "`best_of` must be at least `n`: 3, given: 2"),
        ({"best_of": 2, "stream": True}, "`best_of` above `n`: 1 cannot be streamed, given: 2"),
        ({"prompt": ["a"] * 100, "best_of": 3}, "`best_of` must be at most 256, given: 100 times 3"),
        ({"echo": True, "logprobs": 1, "stream": True}, "`echo` with `logprobs`"),
        ({"prompt_logprobs": 1, "stream": True}, "`prompt_logprobs` cannot be streamed"),
        ({"prompt_logprobs": 21}, "`prompt_logprobs`: input should be less than or equal to 20"),
        ({"max_tokens": 0}, "`max_tokens` of 0 needs `echo` or `prompt_logprobs`"),
        (
            {"repetition_penalty": 5e-324},
            "`repetition_penalty`: input should be greater than or equal to 0.000001",
        ),
        ({"max_tokens": 0, "echo": True, "stream": True}, "`max_tokens` of 0 leaves nothing to stream"),
        ({"prompt": ["a"] * 100, "n": 100}, "must be at most 256, given: 100 times 100"),
        ({"prompt": []}, "`prompt`"),
        ({"prompt": [1, "a"]}, "`prompt"),
        ({"logprobs": 6}, "`logprobs`: input should be less than or equal to 5, given: 6"),
    ],
)
def test_what_is_not_supported_is_refused(
    gateway: FakeGateway, fields: dict[str, object], message: str
) -> None:
    response = complete(gateway, **fields)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_the_best_of_several_answers_are_returned(gateway: FakeGateway) -> None:
    """The best by the mean logprob of their tokens. All of them are counted."""

    def script(stream: AnswerStream) -> None:
        index = len(gateway.streams) - 1
        worse = TokenLogprobs(-1.0 - index % 3, ())
        stream.put([replace(one, logprobs=worse) for one in tokens_of(*"abc"[: index % 3], str(index))])

    gateway.script = script
    answer = complete(gateway, prompt=["Hi", "Ho"], n=2, best_of=3).json()

    assert [choice["text"] for choice in answer["choices"]] == ["0", "a1", "3", "a4"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 2 + 3)
    assert answer["usage"]["prompt_tokens"] == 2 * 5


@pytest.fixture
def coder(tmp_path: Path) -> FakeGateway:
    """A model that can fill in the middle, as Qwen2.5-Coder."""
    backend = byte_level()
    backend.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return FakeGateway(Tokenizer.load(tmp_path))


def test_a_suffix_asks_for_the_text_between(coder: FakeGateway) -> None:
    answer = complete(coder, prompt=["def ", "if "], suffix="():", stop_token_ids=[7]).json()

    assert [choice["text"] for choice in answer["choices"]] == ["Hello", "Hello"]
    assert [request.prompt for request in coder.requests] == [
        InfillPrompt(MARKS[0], prefix, "():") for prefix in ("def ", "if ")
    ]
    marks = ("prefix", "suffix", "middle", "pad")
    ends = tuple(coder.tokenizer_.token_id(f"<|fim_{mark}|>") for mark in marks)
    assert coder.requests[0].sampling.stop_ids == (7, *ends)


def test_a_suffix_needs_a_prompt_of_text(coder: FakeGateway) -> None:
    response = complete(coder, prompt=[1, 2], suffix="end")

    assert response.status_code == 400
    assert "`suffix` needs a `prompt` that is text, given: token ids" in response.json()["error"]["message"]
