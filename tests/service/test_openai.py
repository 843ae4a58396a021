"""The official client against SmolLM2 and a tiny model: what is asked for is what comes back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import openai
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.service.harness import Service

pytestmark = pytest.mark.e2e

MODEL = "smollm2"
TINY = "tiny-a"  #: knows nothing, and answers in milliseconds where answers are only compared
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one word."}
]


@pytest.fixture
def client(service: Service) -> Iterable[openai.OpenAI]:
    with service.client(is_strict=True) as client:
        yield client


def complete(client: openai.OpenAI, prompt: str | list[int], **options: object) -> Completion:
    """Greedy and short unless told otherwise."""
    given = {"temperature": 0, "max_tokens": 8, **options}
    answer = client.completions.create(model=TINY, prompt=prompt, **given)  # type: ignore[call-overload]  # options of any kind
    assert isinstance(answer, Completion)
    return answer


@pytest.mark.client("openai", "models")
def test_lists_the_deployed_models_and_finds_each_by_name(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"smollm2", "hermes", "tiny-a"} <= set(names)
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_model_answers_to_its_alias_too(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=name, prompt="Hi", temperature=0, max_tokens=4).choices[0].text
        for name in ("tiny-a", "little")
    ]
    assert texts[0] == texts[1]


@pytest.mark.client("openai", "chat")
def test_a_chat_answers_a_question_that_the_model_knows(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=12
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.client("openai", "chat, streamed, with usage")
def test_a_streamed_chat_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    options = {"model": TINY, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 10}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]  # one set of options for both
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]  # likewise
    )
    *pieces, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in pieces][:-1] == [None] * (len(pieces) - 1)
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(pieces) > 3
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.client("openai", "completion, streamed")
def test_a_streamed_completion_is_the_same_text_in_pieces(service: Service) -> None:
    with service.client() as client:
        whole = complete(client, "The sun rises in the")
        chunks = client.completions.create(
            model=TINY, prompt="The sun rises in the", temperature=0, max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.client("openai", "completion of token ids, echo")
def test_a_prompt_may_be_token_ids_and_be_echoed(client: openai.OpenAI) -> None:
    by_text = complete(client, "One, two, three,", echo=True, max_tokens=3)
    assert by_text.choices[0].text.startswith("One, two, three,")
    by_ids = complete(client, [504, 7042, 282, 4649, 314], max_tokens=3)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 5


@pytest.mark.client("openai", "cached tokens in usage")
def test_the_second_time_the_prompt_comes_from_the_cache(client: openai.OpenAI) -> None:
    prompt = "Hearths were once the middle of every house. " * 8
    first, second = (complete(client, prompt, max_tokens=2) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert second.usage.prompt_tokens // 2 < cached < second.usage.prompt_tokens


@pytest.mark.client("openai", "`n`")
def test_several_choices_of_one_prompt_differ_and_are_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY, messages=QUESTION, n=2, temperature=1.5, seed=3, max_completion_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16


@pytest.mark.client("openai", "`best_of`")
def test_the_best_of_several_choices_is_the_likeliest_of_them(client: openai.OpenAI) -> None:
    same = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    all_of_them = complete(client, "The sky is", n=4, **same).choices
    (best,) = complete(client, "The sky is", best_of=4, **same).choices

    def mean(choice: CompletionChoice) -> float:
        assert choice.logprobs is not None
        logprobs = [one for one in choice.logprobs.token_logprobs or () if one is not None]
        return sum(logprobs) / len(logprobs)

    assert best.text == max(all_of_them, key=mean).text
    assert len({choice.text for choice in all_of_them}) == 4


@pytest.mark.client("openai", "several prompts")
def test_several_prompts_get_an_answer_each(client: openai.OpenAI) -> None:
    prompts = ["The sky is", "Grass is"]
    together = client.completions.create(model=TINY, prompt=prompts, temperature=0, max_tokens=4)
    alone = [complete(client, prompt, max_tokens=4).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone
    assert alone[0] != alone[1], "else nobody would notice if they were swapped"


@pytest.mark.client("openai", "`stop`")
def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    whole = complete(client, "One, two, three, four,", max_tokens=12).choices[0].text
    stop = whole[6:10]
    cut = complete(client, "One, two, three, four,", max_tokens=12, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


@pytest.mark.client("openai", "`seed`")
def test_the_same_seed_gives_the_same_text_and_another_one_another(client: openai.OpenAI) -> None:
    def told(seed: int) -> str:
        return complete(client, "Once upon a time", temperature=1.3, seed=seed, max_tokens=10).choices[0].text

    assert told(11) == told(11)
    assert told(11) != told(12)


@pytest.mark.client("openai", "`logprobs` of a chat")
def test_logprobs_are_those_of_the_most_likely_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=4
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert answer.usage is not None
    assert len(told.content) == answer.usage.completion_tokens
    for token in told.content:
        top = [one.logprob for one in token.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert token.logprob == top[0] <= 0.0
        assert sum(map(math.exp, top)) <= 1.0 + 1e-4


@pytest.mark.client("openai", "`logprobs` of a completion")
def test_logprobs_of_a_completion_stand_beside_its_tokens(client: openai.OpenAI) -> None:
    told = complete(client, "The sky is", logprobs=2, max_tokens=3).choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == 3
    assert all(value is not None and value <= 0 for value in told.token_logprobs)


@pytest.mark.client("openai", "`logit_bias`")
def test_a_logit_bias_forces_a_token(client: openai.OpenAI) -> None:
    answer = complete(client, "The sky is", logit_bias={"504": 100}, max_tokens=3, logprobs=0)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert len(set(told.tokens)) == 1


@pytest.mark.client("openai", "penalties")
def test_a_penalty_keeps_a_token_from_coming_again_and_again(client: openai.OpenAI) -> None:
    """Only two tokens are within reach, so that without a penalty the likelier one comes most of the time."""

    def count_of_the_commonest(**penalties: float) -> int:
        answer = complete(client, "Say:", logit_bias={"504": 100, "7042": 100}, logprobs=0, **penalties)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        counts = Counter(logprobs.tokens or [])
        assert len(counts) <= 2
        return max(counts.values())

    plain = count_of_the_commonest()
    assert plain >= 6
    assert count_of_the_commonest(frequency_penalty=2.0) < plain


@pytest.mark.client("openai", "`max_completion_tokens`")
def test_max_completion_tokens_ends_an_answer_for_its_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=[{"role": "user", "content": "Count to one hundred."}],
        max_completion_tokens=3,
        temperature=0.0,
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_unknown_fields_are_accepted_as_openai_does(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=TINY, prompt="Hi", max_tokens=1, user="ada", extra_body={"of_the_future": {"x": 1}}
    )
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_an_answer_can_be_explained_by_its_id(service: Service, client: openai.OpenAI) -> None:
    answer = complete(client, "Hello", max_tokens=2)
    explained = service.explain(answer.id)
    assert explained["outcome"] in ("length", "stop")
    assert explained["model"] == TINY
    assert explained["num_output_tokens"] == 2
