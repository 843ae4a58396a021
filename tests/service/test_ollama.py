"""Ollama's client against SmolLM2 and a tiny model: what is asked for is what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.harness import PATIENCE_S, Service, Shelf

if TYPE_CHECKING:
    import ollama

pytestmark = pytest.mark.e2e

MODEL = "smollm2:latest"
TINY = "tiny-a:latest"  #: knows nothing, and answers in milliseconds where answers are only compared
GREEDY = {"temperature": 0, "num_predict": 10}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(service: Service) -> Iterator[ollama.Client]:
    import ollama

    client = ollama.Client(service.url, timeout=PATIENCE_S)
    yield client
    client._client.close()


@pytest.mark.client("ollama", "chat")
def test_a_chat_answers_a_question_that_the_model_knows(client: ollama.Client) -> None:
    answer = client.chat(MODEL, QUESTION, options=GREEDY)

    assert "Paris" in (answer.message.content or "")
    assert (answer.model, answer.done, answer.message.role) == (MODEL, True, "assistant")
    assert 0 < (answer.eval_count or 0) <= 10
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    assert (answer.prompt_eval_duration or 0) > 0


@pytest.mark.client("ollama", "chat, streamed")
def test_a_streamed_chat_is_the_same_text_in_pieces(client: ollama.Client) -> None:
    whole = client.chat(TINY, QUESTION, options=GREEDY)
    *pieces, last = client.chat(TINY, QUESTION, options=GREEDY, stream=True)

    assert len(pieces) > 2
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert (last.done, last.done_reason, last.eval_count) == (True, whole.done_reason, whole.eval_count)


@pytest.mark.client("ollama", "generate")
def test_a_prompt_is_continued_raw_or_answered_and_followed_by_its_context(client: ollama.Client) -> None:
    raw = client.generate(MODEL, "One, two, three,", raw=True, options=GREEDY)
    first = client.generate(MODEL, QUESTION[0]["content"], system="You are brief.", options=GREEDY)
    pieces = client.generate(
        MODEL, QUESTION[0]["content"], system="You are brief.", options=GREEDY, stream=True
    )

    assert "four" in (raw.response or "")
    assert "Paris" in (first.response or "")
    assert "".join(piece.response or "" for piece in pieces) == first.response
    assert len(first.context or []) == (first.prompt_eval_count or 0) + (first.eval_count or 0)
    second = client.generate(MODEL, "And of Italy?", context=first.context, options=GREEDY)
    assert (second.prompt_eval_count or 0) > len(first.context or [])


@pytest.mark.client("ollama", "tools")
def test_a_call_of_a_tool_goes_and_comes_as_an_object(client: ollama.Client) -> None:
    asked = [{"role": "user", "content": "Call get_weather for Rome."}]
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
    }
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    answer = client.chat("hermes", [*asked, called, result], tools=[WEATHER], options=GREEDY)

    assert answer.done
    for call in answer.message.tool_calls or ():
        assert isinstance(call.function.arguments, dict)


@pytest.mark.client("ollama", "`format` of JSON, and with a schema")
def test_an_answer_is_held_to_a_format(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    held = client.chat(TINY, QUESTION, format=schema, options=GREEDY | {"num_predict": 40})
    free = client.generate(TINY, "A city as JSON", format="json", options=GREEDY)

    assert json.loads(held.message.content or "")["city"] in ("Paris", "Rome")
    assert (free.response or "").lstrip().startswith("{")


@pytest.mark.client("ollama", "list, show, ps")
def test_models_are_listed_shown_and_seen_loaded(client: ollama.Client) -> None:
    client.generate(MODEL, keep_alive="5m")

    listed = {model.model for model in client.list().models}
    assert {"smollm2:latest", "hermes:latest", "little:latest"} <= listed
    shown = client.show(MODEL)
    assert "completion" in (shown.capabilities or [])
    assert (shown.modelinfo or {})["general.parameter_count"] > 100e6
    assert MODEL in {model.model for model in client.ps().models}


@pytest.mark.client("ollama", "load and unload by `keep_alive`")
def test_an_empty_prompt_loads_and_unloads(client: ollama.Client, service: Service) -> None:
    loaded = client.generate("tiny-c", keep_alive="10m")
    assert (loaded.done_reason, "tiny-c" in service.hosted()) == ("load", True)

    unloaded = client.generate("tiny-c", keep_alive=0)
    assert (unloaded.done_reason, "tiny-c" in service.hosted()) == ("unload", False)


@pytest.mark.client("ollama", "embeddings")
def test_texts_become_embeddings_of_length_one(client: ollama.Client) -> None:
    answer = client.embed(TINY, ["Hello there", "Good day"])
    older = client.embeddings(TINY, "Hello there")

    assert len(answer.embeddings) == 2
    assert sum(number**2 for number in answer.embeddings[0]) == pytest.approx(1.0, abs=1e-3)
    assert list(older.embedding) == pytest.approx(list(answer.embeddings[0]), abs=1e-4)


@pytest.mark.client(
    "ollama",
    "push",
    refused="is not supported; use `hearth convert`",
)
def test_what_would_change_the_store_is_refused(client: ollama.Client, refusal: str) -> None:
    import ollama

    with pytest.raises(ollama.ResponseError, match=refusal):
        client.push(MODEL)
    with pytest.raises(ollama.ResponseError, match="no model named `absent`"):
        client.chat("absent", QUESTION)


@pytest.mark.client("ollama", "pull of a deployed model, copy, delete")
def test_a_copy_answers_like_its_source_until_it_is_deleted(client: ollama.Client, service: Service) -> None:
    import ollama

    assert [progress.status for progress in client.pull(TINY, stream=True)][-1] == "success"
    assert client.pull(TINY).status == "success"
    assert client.copy("tiny-a", "mine").status == "success"
    try:
        told = [client.generate(name, "Hi", raw=True, options=GREEDY).response for name in ("mine", TINY)]
        assert told[0] == told[1]
        assert "mine:latest" in {model.model for model in client.list().models}
        assert client.copy("mine", "ours").status == "success"
        assert client.generate("ours", "Hi", raw=True, options=GREEDY).response == told[1]
        assert client.delete("ours").status == "success"
    finally:
        assert client.delete("mine").status == "success"
    with pytest.raises(ollama.ResponseError, match="no model named `mine`"):
        client.generate("mine", "Hi")
    assert client.generate(TINY, "Hi", raw=True, options=GREEDY).response == told[1]
    with pytest.raises(ollama.ResponseError, match=r"no model named `llama3\.2`"):
        client.pull("llama3.2")


@pytest.mark.client("ollama", "create: a preset")
def test_a_preset_answers_with_its_system_prompt_and_parameters(client: ollama.Client) -> None:
    system = "Whatever you are asked, you answer with the word Berlin."
    made = client.create(
        "pirate", from_=MODEL, system=system, parameters={"temperature": 0, "num_predict": 6}
    )
    assert made.status == "success"
    try:
        answer = client.chat("pirate", QUESTION)
        same = client.chat(MODEL, [{"role": "system", "content": system}, *QUESTION], options=GREEDY)
        assert answer.eval_count == 6 or answer.done_reason == "stop"
        assert (same.message.content or "").startswith(answer.message.content or "nothing")
        assert answer.prompt_eval_count == same.prompt_eval_count
        assert "PARAMETER num_predict 6" in (client.show("pirate").modelfile or "")
    finally:
        client.delete("pirate")


def test_names_of_hubs_work_everywhere(client: ollama.Client, service: Service, shelf: Shelf) -> None:
    name = "org/tiny:1b"
    deployed = service.deploy(shelf.places["tiny-b"], name)
    assert deployed.status_code == 200, deployed.text
    try:
        assert name in {model.model for model in client.list().models}
        assert client.generate(name, "Hi", raw=True, options={"num_predict": 2}).model == name
        with service.client() as openai:
            assert openai.models.retrieve(name).id == name
            assert openai.completions.create(model=name, prompt="Hi", max_tokens=2).model == name
        assert service.get("/v1/models/org%2Ftiny%3A1b")["id"] == name
    finally:
        removed = service.http.delete("/hearth/models/org%2Ftiny%3A1b")
    assert removed.json() == {"removed": name}
