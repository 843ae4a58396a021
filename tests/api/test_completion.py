from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hearth.api import answer as answer_module
from hearth.text.detokenizer import prompt_text
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import complete, events
from tests.api.fake import FakeGateway, tokens_of, with_logprobs


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "end"}, "`suffix` is not supported"),
        ({"best_of": 3}, "`best_of` must be the same as `n`: 1, given: 3"),
        ({"echo": True, "logprobs": 1}, "`echo` with `logprobs`"),
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
