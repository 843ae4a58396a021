"""Ollama's API: what the inner request becomes, and how its answer is spelt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import pytest

from hearth.api.answer import MANY_BYTES
from hearth.api.ollama.models import show_object
from hearth.control.deploy.preset import Preset
from hearth.control.observe.views import Explanation, ProcessView, ResidentView, TimelineSpan, WorkerView
from hearth.control.requests.caller import Caller
from hearth.control.requests.generation import AnswerStream, ChatPrompt, InfillPrompt
from hearth.core.errors import EngineFailed
from hearth.core.types import FinishReason, PromptReading
from hearth.text.infill import MARKS
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import request
from tests.api.fake import MODEL, FakeGateway, FakeKeys, tokens_of
from tests.text.conftest import byte_level

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]
EXPLAINED = Explanation(
    **{"request_id": "r0", "model": "tiny", "arrived_at_s": 0.0, "outcome": "stop", "error": None},  # type: ignore[arg-type] # of many kinds
    **{"worker": "w0", "why": None, "options": (), "num_prompt_tokens": 5, "num_cached_tokens": 2},  # type: ignore[arg-type] # likewise
    **{"num_output_tokens": 2, "queue_s": 0.0, "load_s": 0.25, "first_token_s": 0.5, "total_s": 2.0},  # type: ignore[arg-type] # likewise
    **{"tokens_per_s": 1.0, "reused_bytes": 0, "shared_bytes": 0, "rungs": (), "num_preemptions": 0},  # type: ignore[arg-type] # likewise
    num_resumes=0,
    spans=(TimelineSpan("prefill", 0.25, 0.5), TimelineSpan("decode", 0.5, 2.0)),
    marks=(),
)


def chat(gateway: FakeGateway, **fields: object) -> httpx.Response:
    return request(gateway, "POST", "/api/chat", {"model": "tiny", "messages": HI} | fields)


def generate(gateway: FakeGateway, **fields: object) -> httpx.Response:
    return request(gateway, "POST", "/api/generate", {"model": "tiny", "prompt": "Hi"} | fields)


def lines(response: httpx.Response) -> list[dict[str, object]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def prompt_of(gateway: FakeGateway) -> ChatPrompt:
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"origin": "http://localhost"}, 415), ({"sec-fetch-site": "none"}, 415)],
)
def test_the_curl_of_its_examples_needs_no_content_type(
    gateway: FakeGateway, headers: dict[str, str], status: int
) -> None:
    """A bare `curl -d` claims that its body is a form. A page's form says that a page is behind it."""
    body = json.dumps({"model": "tiny", "prompt": "Hi"})
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = request(gateway, "POST", "/api/generate", content=body, headers=form | headers)

    assert response.status_code == status


def test_a_chat_is_a_line_of_json_per_token_unless_it_is_wanted_in_one(gateway: FakeGateway) -> None:
    gateway.explanation = EXPLAINED
    *pieces, last = lines(chat(gateway, model="small:latest"))

    assert [piece["message"] for piece in pieces] == [
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": "lo"},
    ]
    assert all(piece["done"] is False and piece["model"] == "small:latest" for piece in pieces)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 2)
    told = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert [last[name] for name in told] == [2_000_000_000, 250_000_000, 250_000_000, 1_500_000_000]

    whole = chat(gateway, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello"}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 2)


def test_a_line_has_the_time_at_which_it_is_sent(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr("hearth.api.ollama.dialect.now_text", lambda: f"at {next(seconds)}")
    first, *_, last = lines(chat(gateway))

    assert first["created_at"] != last["created_at"]


def test_options_become_the_sampling_of_the_one_request(gateway: FakeGateway) -> None:
    options = {"num_predict": 7, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}
    chat(gateway, options=options | {"stop": "\n", "repeat_penalty": 1.2, "presence_penalty": 0.5})

    sampling = gateway.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0, 5)
    assert (sampling.top_p, sampling.min_p, sampling.seed, sampling.stop) == (0.5, 0.1, 3, ("\n",))
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.2, 0.5)


def test_without_options_it_samples_as_ollama_does(gateway: FakeGateway) -> None:
    chat(gateway, options={"num_predict": -1, "seed": -1})
    generate(gateway, raw=True)

    for asked in gateway.requests:
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
        assert (sampling.max_tokens, sampling.seed, sampling.repetition_penalty) == (None, None, 1.0)


def test_calls_have_objects_as_arguments_both_ways(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["hermes"], lambda stream: stream.put(tokens_of("Well", CALL)))
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    result = {"role": "tool", "content": "2", "tool_name": "add"}
    text, call, _ = lines(chat(gateway, messages=[*HI, called, result], tools=[ADD]))
    whole = chat(gateway, tools=[ADD], stream=False).json()

    assert text["message"] == {"role": "assistant", "content": "Well"}
    for message in (call["message"], whole["message"]):
        (made,) = message["tool_calls"]
        assert (made["function"]["name"], made["function"]["arguments"]) == ("add", {"a": 1})
    _, sent, told = gateway.requests[0].prompt.messages  # type: ignore[union-attr] # a conversation
    assert sent["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}  # type: ignore[index, call-overload] # a list of objects
    assert told == {"role": "tool", "content": "2", "name": "add"}


def test_an_answer_that_the_last_message_begins_goes_on(gateway: FakeGateway) -> None:
    chat(gateway, messages=[*HI, {"role": "assistant", "content": "Hel"}])

    assert prompt_of(gateway).is_continued


def test_a_format_is_json_or_a_schema(gateway: FakeGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in ("json", schema, "", None):
        assert chat(gateway, format=given).status_code == 200

    by_json, by_schema, *others = [asked.guide for asked in gateway.requests]
    assert by_json is not None
    assert by_schema is not None
    assert (by_json.kind, by_schema.kind, json.loads(by_schema.text)) == (
        "json_object",
        "json_schema",
        schema,
    )
    assert others == [None, None]


def test_a_prompt_is_rendered_by_the_template_unless_it_is_raw(gateway: FakeGateway) -> None:
    *pieces, last = lines(generate(gateway, system="Be kind."))
    raw = generate(gateway, raw=True, stream=False).json()

    assert [piece["response"] for piece in pieces] == ["Hel", "lo"]
    assert gateway.requests[0].prompt == ChatPrompt(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    )
    assert (raw["response"], gateway.requests[1].prompt) == ("Hello", "Hi")
    assert last["context"] == [1, 2, 3, 4, 5, 300, 301]
    assert "context" not in raw


def test_a_prompt_may_follow_the_context_of_an_earlier_answer(gateway: FakeGateway) -> None:
    response = generate(gateway, context=[7, 8], stream=False)

    assert response.status_code == 200, response.text
    (asked,) = gateway.requests
    assert (asked.prompt, asked.follows) == (ChatPrompt([{"role": "user", "content": "Hi"}]), (7, 8))


def test_a_prompt_follows_its_context_without_a_template_too(gateway: FakeGateway) -> None:
    bare = replace(MODEL, has_chat_template=False)
    gateway.model = lambda *asked: bare  # type: ignore[method-assign] # the script of this test
    assert generate(gateway, context=[7, 8], stream=False).status_code == 200

    (asked,) = gateway.requests
    assert (asked.prompt, asked.follows) == ("Hi", (7, 8))


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_nothing_to_answer_loads_or_unloads_the_model(gateway: FakeGateway, path: str, field: str) -> None:
    loaded = request(gateway, "POST", path, {"model": "tiny", "keep_alive": "10m"}).json()
    unloaded = request(gateway, "POST", path, {"model": "tiny", "keep_alive": 0}).json()

    (asked,) = gateway.requests
    assert (asked.prompt, asked.sampling.max_tokens, asked.keep_alive_s) == ([0], 1, 600.0)
    assert (loaded["done"], loaded["done_reason"], unloaded["done_reason"]) == (True, "load", "unload")
    assert field in loaded
    assert gateway.done == ["unload tiny True"]


def test_only_an_admin_unloads(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()
    key = {"authorization": "Bearer user-key"}
    refused = request(gateway, "POST", "/api/generate", {"model": "tiny", "keep_alive": 0}, headers=key)

    assert refused.status_code == 403
    assert "needs a key with the role `admin`" in refused.json()["error"]


def test_models_are_listed_under_all_their_names(gateway: FakeGateway) -> None:
    listed = request(gateway, "GET", "/api/tags").json()["models"]

    assert [model["name"] for model in listed] == ["tiny:latest", "small:latest"]
    first = listed[0]
    assert (first["model"], first["size"], first["digest"]) == ("tiny:latest", 1000, MODEL.digest)
    assert first["modified_at"] == "2023-11-14T22:13:20.500000Z"
    assert (first["details"]["parameter_size"], first["details"]["quantization_level"]) == ("250", "F32")
    assert (first["details"]["family"], first["details"]["families"]) == ("llama", ["llama"])


def test_a_suffix_asks_for_the_text_between(tmp_path: Path) -> None:
    """Without the chat template, as with Ollama's templates for it."""
    backend = byte_level()
    backend.add_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    coder = FakeGateway(Tokenizer.load(tmp_path))

    answer = generate(coder, prompt="def ", suffix="():", stream=False).json()
    refused = generate(coder, prompt="def ", suffix="():", system="Be brief.")

    assert answer["response"] == "Hello"
    assert coder.requests[0].prompt == InfillPrompt(MARKS[1], "def ", "():")
    assert "`suffix` takes a prompt that is whole, and no `system`" in refused.json()["error"]
    assert show_object(MODEL, coder.tokenizer_)["capabilities"] == ["completion", "insert", "embedding"]


def test_a_model_is_shown_with_what_it_can_do(tokenizers: dict[str, Tokenizer]) -> None:
    shown = request(FakeGateway(tokenizers["hermes"]), "POST", "/api/show", {"name": "tiny"}).json()

    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert shown["details"]["family"] == shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 2048
    assert shown["template"] == tokenizers["hermes"].chat_template_text


def test_models_that_are_loaded_are_listed_to_monitors(gateway: FakeGateway) -> None:
    worker = WorkerView("w0", 1, "cuda", "GPU", "ready", 100, 50, 0)
    warm = ResidentView("tiny", "w0", "warm", 50, 40, 40, 0, 300.0)
    left = replace(warm, is_hosted=False)

    async def fresh_ps() -> ProcessView:
        return ProcessView((worker,), (warm, left), 0, 0)

    gateway.fresh_ps = fresh_ps  # type: ignore[method-assign] # the script of this test
    (model,) = request(gateway, "GET", "/api/ps").json()["models"]
    assert (model["name"], model["size"], model["size_vram"]) == ("tiny:latest", 50, 50)
    assert model["context_length"] == 2048
    gateway.keys = FakeKeys()
    refused = request(gateway, "GET", "/api/ps", headers={"authorization": "Bearer user-key"})
    assert refused.status_code == 403


def test_an_embedding_is_spelt_as_ollama_does_in_both_forms(gateway: FakeGateway) -> None:
    def script(stream: AnswerStream) -> None:
        stream.reading = PromptReading(embedding=b"\0\0\x80\x3f\0\0\0\0")
        stream.end(FinishReason.LENGTH)

    gateway.script, gateway.explanation = script, EXPLAINED
    new = request(gateway, "POST", "/api/embed", {"model": "tiny", "input": ["Hi", "Ho"]}).json()
    old = request(gateway, "POST", "/api/embeddings", {"model": "tiny", "prompt": "Hi"}).json()

    assert new["embeddings"] == [[1.0, 0.0], [1.0, 0.0]]
    assert (new["model"], new["prompt_eval_count"]) == ("tiny", 10)
    assert old == {"embedding": [1.0, 0.0]}
    refused = request(gateway, "POST", "/api/embed", {"model": "tiny", "input": "Hi", "dimensions": 64})
    assert "`dimensions` is not supported" in refused.json()["error"]


def test_nothing_to_embed_is_answered_with_no_embeddings_as_ollama_does(gateway: FakeGateway) -> None:
    for nothing in ("", []):
        response = request(gateway, "POST", "/api/embed", {"model": "tiny", "input": nothing})
        assert response.json() == {"model": "tiny", "embeddings": []}
    assert not gateway.requests
    assert request(gateway, "POST", "/api/embed", {"model": "none", "input": []}).status_code == 404


def test_push_is_refused_with_what_to_do(gateway: FakeGateway) -> None:
    response = request(gateway, "POST", "/api/push", {"model": "tiny"})

    assert response.status_code == 403
    assert "hearth convert" in response.json()["error"]


def pull(gateway: FakeGateway, model: str, **fields: object) -> httpx.Response:
    return request(gateway, "POST", "/api/pull", {"model": model, **fields})


def test_what_is_deployed_is_pulled_without_a_download(gateway: FakeGateway) -> None:
    statuses = [line["status"] for line in lines(pull(gateway, "tiny:latest"))]

    assert statuses == ["pulling manifest", "success"]
    assert pull(gateway, "tiny", stream=False).json() == {"status": "success"}
    assert gateway.done == []


@pytest.mark.parametrize(
    ("model", "deployed"),
    [
        ("hf.co/Org/Name:latest", "hf:Org/Name hf.co/Org/Name"),
        ("hf.co/Org/Name-GGUF:Q4_K_M", "hf:Org/Name-GGUF:Q4_K_M hf.co/Org/Name-GGUF:Q4_K_M"),
        ("huggingface.co/Org/Name", "hf:Org/Name huggingface.co/Org/Name"),
        ("Org/Name", "hf:Org/Name Org/Name"),
        ("hf:Org/Name", "hf:Org/Name None"),
    ],
)
def test_a_model_of_the_hub_is_pulled_under_the_name_that_was_asked_for(
    gateway: FakeGateway, model: str, deployed: str
) -> None:
    progress, success = lines(pull(gateway, model))

    assert (progress["status"], progress["completed"], progress["total"]) == ("converting", 1, 2)
    assert str(progress["digest"]).startswith("sha256:")
    assert success == {"status": "success"}
    assert gateway.done == [f"deploy {deployed} auto auto False"]
    assert pull(gateway, model, stream=False).json() == {"status": "success"}


def test_what_cannot_be_pulled_says_why(gateway: FakeGateway) -> None:
    unknown = pull(gateway, "llama3.2")
    assert unknown.status_code == 404
    assert "`hf.co/ORG/NAME`" in unknown.json()["error"]

    gateway.deploy_failure = EngineFailed("the disk is full")
    assert "the disk is full" in str(lines(pull(gateway, "Org/Name"))[-1]["error"])

    gateway.keys = FakeKeys()
    headers = {"authorization": "Bearer user-key"}
    refused = request(gateway, "POST", "/api/pull", {"model": "Org/Name"}, headers=headers)
    assert (refused.status_code, "role `admin`" in refused.json()["error"]) == (403, True)
    assert request(gateway, "POST", "/api/pull", {"model": "tiny"}, headers=headers).status_code == 200


def test_a_model_is_copied_and_deleted_by_an_admin(gateway: FakeGateway) -> None:
    names = {"source": "small:latest", "destination": "mine:latest"}
    copied = request(gateway, "POST", "/api/copy", names)
    deleted = request(gateway, "DELETE", "/api/delete", {"name": "small"})

    assert (copied.status_code, copied.content, deleted.status_code, deleted.content) == (200, b"", 200, b"")
    assert (gateway.presets, gateway.done) == ({"mine": Preset()}, ["remove tiny"])
    assert request(gateway, "POST", "/api/copy", names | {"source": "none"}).status_code == 404
    assert request(gateway, "DELETE", "/api/delete", {"model": "none"}).status_code == 404
    gateway.keys = FakeKeys()
    headers = {"authorization": "Bearer user-key"}
    assert request(gateway, "POST", "/api/copy", names, headers=headers).status_code == 403
    assert request(gateway, "DELETE", "/api/delete", {"model": "tiny"}, headers=headers).status_code == 403


def test_create_makes_a_preset_that_show_tells(gateway: FakeGateway) -> None:
    options = {"temperature": 0.2, "num_predict": 64, "stop": ["\n"]}
    body = {"model": "pirate", "from": "tiny", "system": "Arr.", "parameters": options, "stream": False}
    assert request(gateway, "POST", "/api/create", body).json() == {"status": "success"}
    preset = Preset(system="Arr.", temperature=0.2, max_tokens=64, stop=("\n",))
    assert gateway.presets == {"pirate": preset}

    shown = show_object(replace(MODEL, name="pirate", base="tiny", preset=preset), gateway.tokenizer_)
    assert shown["system"] == "Arr."
    assert shown["modelfile"] == (
        "# deployed with Hearth\nFROM tiny\nPARAMETER temperature 0.2\nPARAMETER num_predict 64\n"
        'PARAMETER stop "\\n"\nSYSTEM """Arr."""\n'
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "{{ .System }}"}, "not Go as Ollama's"),
        ({"template": "{% if %}"}, "does not compile"),
        ({"adapters": {"a": "sha256:0"}}, "deploy the model or adapter first"),
        ({"parameters": {"temperature": -1}}, "temperature"),
        ({"parameters": {"mirostat": 1}}, "mirostat"),
    ],
)
def test_what_create_cannot_keep_is_refused(
    gateway: FakeGateway, fields: dict[str, object], message: str
) -> None:
    refused = request(gateway, "POST", "/api/create", {"model": "pirate", "from": "tiny"} | fields)
    assert refused.status_code in (400, 422)
    assert message in refused.json()["error"]
    assert gateway.presets == {}


def test_clients_find_it_without_a_key(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()

    for method in ("GET", "HEAD"):
        greeting = request(gateway, method, "/")
        assert (greeting.status_code, greeting.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert "Ollama is running" in request(gateway, "GET", "/").text
    assert request(gateway, "GET", "/api/tags").status_code == 401


def test_its_version_is_one_of_ollama(gateway: FakeGateway) -> None:
    major, minor, patch = request(gateway, "GET", "/api/version").json()["version"].split(".")

    assert (int(major), int(minor), int(patch)) >= (0, 6, 4)  # what clients ask for


def test_a_stream_that_fails_ends_with_an_error_of_ollamas(gateway: FakeGateway) -> None:
    def script(stream: AnswerStream) -> None:
        stream.put(tokens_of("Hel", finish=None))
        stream.fail(EngineFailed("it broke"))

    gateway.script = script

    assert lines(chat(gateway))[-1] == {"error": "it broke"}


def test_what_is_not_read_is_told(gateway: FakeGateway) -> None:
    response = chat(gateway, options={"num_ctx": 4096, "num_gpu": 1, "numa": True}, stream=False)

    assert response.headers["x-hearth-ignored-fields"] == "options.num_ctx, options.num_gpu, options.numa"
    assert gateway.ignored == ["options.num_ctx", "options.num_gpu", "other"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"top_p": 2}}, "`options.top_p`: input should be less than or equal to 1, given: 2"),
        ({"options": {"num_predict": 0}}, "`options.num_predict` must be at least 1"),
        ({"options": {"stop": [""]}}, "`options.stop` contains an empty text"),
        ({"options": {"stop": ["x"] * 17}}, "`options.stop`: at most 16 stop strings are allowed"),
        ({"options": {"mirostat": 2}}, "`options.mirostat` is not supported"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["abc"]}]}, "`messages[0].images` is not"),
        ({"messages": [{"role": "cat", "content": "Hi"}]}, "`messages[0].role`: input should be 'system'"),
        ({"keep_alive": "soon"}, "`keep_alive`: a duration is a number of seconds"),
        ({"format": "xml"}, "`format`: input should be '' or 'json'"),
        ({"logprobs": True}, "`logprobs` is not supported"),
    ],
)
def test_errors_name_the_clients_own_fields(
    gateway: FakeGateway, fields: dict[str, object], message: str
) -> None:
    response = chat(gateway, **fields)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]


def test_raw_takes_no_more_than_a_prompt(gateway: FakeGateway) -> None:
    response = generate(gateway, raw=True, system="Be kind.")

    assert (response.status_code, "no `system`" in response.json()["error"]) == (400, True)


def test_the_durations_of_many_embeddings_are_asked_for_on_the_event_loop(gateway: FakeGateway) -> None:
    def script(stream: AnswerStream) -> None:
        stream.reading = PromptReading(embedding=bytes(MANY_BYTES + 4))  # spelt on a thread
        stream.end(FinishReason.LENGTH)

    def explain(request_id: str, caller: Caller) -> Explanation | None:
        asyncio.get_running_loop()  # or a RuntimeError
        return EXPLAINED

    gateway.script, gateway.explain = script, explain  # type: ignore[method-assign] # the script of this test
    response = request(gateway, "POST", "/api/embed", {"model": "tiny", "input": "Hi"})

    assert response.status_code == 200
    (embedding,) = response.json()["embeddings"]
    assert len(embedding) == MANY_BYTES // 4 + 1


def test_open_webui_gets_the_fields_that_it_reads(gateway: FakeGateway) -> None:
    """Sends what its router of Ollama sends: every option that its users can set, and no images."""
    gateway.explanation = EXPLAINED
    numbers = ("num_ctx", "num_batch", "num_keep", "repeat_last_n", "num_gpu", "num_thread", "top_k")
    options = dict.fromkeys(numbers, 64) | {"temperature": 1, "use_mmap": True, "use_mlock": False}
    options |= {"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_penalty": 1.1, "stop": ["x"]}
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi", "images": []}]
    fields = {"messages": messages, "options": options, "keep_alive": "5m", "think": False, "stream": True}

    model, _ = request(gateway, "GET", "/api/tags").json()["models"]
    version = request(gateway, "GET", "/api/version").json()["version"]
    told = lines(request(gateway, "POST", "/api/chat", {"model": "tiny:latest"} | fields))

    assert model["model"] == model["name"] == "tiny:latest"
    assert {"size", "digest", "modified_at", "details"} <= model.keys()
    assert {"parameter_size", "quantization_level", "family"} <= model["details"].keys()
    assert tuple(map(int, version.split("."))) >= (0, 5)
    assert "".join(line["message"]["content"] for line in told) == "Hello"
    assert [line["done"] for line in told] == [False, False, True]
    counts = ("prompt_eval_count", "eval_count", "total_duration", "load_duration", "eval_duration")
    assert all(isinstance(told[-1][count], int) for count in (*counts, "prompt_eval_duration"))
    assert generate(gateway, keep_alive=0, prompt="").json()["done_reason"] == "unload"
