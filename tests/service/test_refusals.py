"""What cannot be served is refused as OpenAI refuses it: the right class, the field, the limit."""

from __future__ import annotations

from collections.abc import Iterable

import openai
import pytest

from tests.service.checkpoints import MAX_POSITIONS
from tests.service.harness import Service

pytestmark = pytest.mark.e2e


@pytest.fixture
def client(service: Service) -> Iterable[openai.OpenAI]:
    with service.client() as client:
        yield client


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="tiny-q", prompt="Hi")
    assert "tiny-q" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny-q")


def test_a_temperature_out_of_range_names_the_field_and_its_limits(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-a", prompt="Hi", temperature=3.5)
    assert caught.value.param == "temperature"
    assert "3.5" in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", "many"), ("n", 0), ("top_p", "x"), ("stream", "perhaps"), ("logit_bias", {"5": "x"})],
)
def test_a_value_of_the_wrong_type_names_its_field(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-a", prompt="Hi", extra_body={field: value})
    assert (caught.value.param or "").startswith(field)
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-a", prompt=[1] * (MAX_POSITIONS + 5), max_tokens=1)
    assert str(MAX_POSITIONS + 5) in caught.value.message
    assert str(MAX_POSITIONS - 1) in caught.value.message


def test_a_context_that_was_configured_counts_instead_of_the_model_s(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-c", prompt=[1] * 70, max_tokens=1)
    assert "63" in caught.value.message
    answer = client.completions.create(
        model="tiny-c", prompt=[1] * 60, max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens <= 64
    assert answer.choices[0].finish_reason == "length"


def test_an_empty_prompt_and_a_token_outside_the_vocabulary_are_refused(client: openai.OpenAI) -> None:
    for prompt in ([], [10_000_000]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny-a", prompt=prompt, max_tokens=1)


@pytest.mark.parametrize("num_answers", [1, 2])
def test_of_several_prompts_the_one_that_is_refused_is_named(client: openai.OpenAI, num_answers: int) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt at index 1 of 3: prompt has 0 tokens"):
        client.completions.create(model="tiny-a", prompt=["Hi", "", "Ho"], max_tokens=1, n=num_answers)
    long = [1] * (MAX_POSITIONS + 5)
    with pytest.raises(openai.BadRequestError, match=r"prompt at index 1 of 2: prompt has \d+ tokens"):
        client.completions.create(model="tiny-a", prompt=[[1], long], max_tokens=1, n=num_answers)


def test_of_several_inputs_the_one_that_is_empty_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"prompt at index 2 of 3: .* send a text that is not empty"
    ):
        client.embeddings.create(model="tiny-a", input=["Hi", "Ho", ""])


def test_an_image_is_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny-a",
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}],
                }
            ],
        )
    assert "image" in caught.value.message


def test_paths_and_methods_that_do_not_exist_answer_with_an_error_object(service: Service) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/models", 405)):
        answer = service.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_a_body_that_is_no_json_answers_with_an_error_object(service: Service) -> None:
    answer = service.http.post(
        "/v1/completions", content=b"{not json", headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
