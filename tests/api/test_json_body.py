from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.api import body, json_body, unread_fields
from hearth.api.dialect import AnswerSpec
from hearth.api.json_body import SMALL_BYTES, TooManyValues, count_values, parse_json
from hearth.api.openai.chat import ChatBody
from tests.api.conftest import Connection, app_of, request
from tests.api.fake import FakeGateway

TREES = st.recursive(
    st.integers(0, 9) | st.text('a,[{"\\\\\\n\u00e9', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('b,[{"\\\\', max_size=4), inner),
    max_leaves=20,
)


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that bodies are parsed on."""
    threads: list[threading.Thread] = []

    def noted(text: bytes) -> object:
        threads.append(threading.current_thread())
        return parse_json(text)

    monkeypatch.setattr(json_body, "parse_json", noted)
    return threads


def num_commas(value: object) -> int:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(children) - 1) + sum(map(num_commas, children))


def num_containers(value: object) -> int:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return isinstance(value, list | dict) + sum(map(num_containers, children))


@given(value=TREES, piece_bytes=st.integers(1, 40), is_ascii=st.booleans())
def test_values_are_counted_as_a_parser_would_find_them(
    value: object, piece_bytes: int, is_ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "PIECE_BYTES", piece_bytes)
        patch.setattr(json_body, "MAX_VALUES", num_commas(value))
        patch.setattr(json_body, "MAX_CONTAINERS", num_containers(value))
        count_values(text)
        patch.setattr(json_body, "MAX_CONTAINERS", num_containers(value) - 1)
        if num_containers(value):
            with pytest.raises(TooManyValues, match="lists and objects"):
                count_values(text)
        patch.setattr(json_body, "MAX_VALUES", num_commas(value) - 1)
        if num_commas(value):
            with pytest.raises(TooManyValues):
                count_values(text)


@pytest.mark.parametrize(
    ("prompt", "limit"),
    [("1," * 7_000_000 + "1", json_body.MAX_VALUES), ("[]," * 100_000 + "[]", json_body.MAX_CONTAINERS)],
)
def test_more_values_than_the_limit_are_refused_before_they_are_parsed(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, prompt: str, limit: int
) -> None:
    def never(text: object) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr(json_body.json, "loads", never)
    response = request(
        gateway,
        "POST",
        "/v1/completions",
        headers={"content-type": "application/json"},
        content=f'{{"model": "tiny", "prompt": [{prompt}]}}',
        max_body_bytes=16 << 20,
    )
    monkeypatch.undo()

    assert response.status_code == 400, response.text
    assert f"than the limit: {limit}; send" in response.json()["error"]["message"]


def test_large_bodies_are_parsed_off_the_event_loop(
    gateway: FakeGateway, parsing: list[threading.Thread]
) -> None:
    for num_chars in (10, 100_000):
        body = {"model": "tiny", "prompt": "a, b" * num_chars}
        response = request(gateway, "POST", "/v1/completions", body, max_body_bytes=1 << 20)
        assert response.status_code == 200, response.text

    small, large = parsing
    assert small is threading.main_thread()
    assert large is not threading.main_thread()


def test_large_bodies_are_checked_off_the_event_loop(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(*fields: Any) -> str | None:
        threads.append(threading.current_thread())
        return unread_fields.refused(*fields)

    monkeypatch.setattr(body, "refused", noted)
    for num_chars, status in ((10, 200), (100_000, 200), (100_000, 400)):
        threads.clear()
        n = 200 if status == 400 else 1
        fields = {"model": "tiny", "prompt": "a, b" * num_chars, "n": n, "unheard_of": 1}
        response = request(gateway, "POST", "/v1/completions", fields, max_body_bytes=1 << 20)
        assert response.status_code == status, response.text
        if threads:  # faults of fields are found before what nobody reads is looked at
            assert (threads[0] is threading.main_thread()) == (num_chars == 10)
    assert response.json()["error"]["param"] == "n"


TALK = [{"role": "user", "content": "a" * SMALL_BYTES}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": TALK}),
        ("/v1/responses", {"input": TALK}),
        ("/v1/messages", {"messages": TALK, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": TALK}),
        ("/api/chat", {"messages": TALK}),
        ("/tokenize", {"messages": TALK}),
    ],
)
def test_large_bodies_are_translated_off_the_event_loop(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, object]
) -> None:
    threads: list[threading.Thread] = []
    validate, specify = ChatBody.model_validate, ChatBody.answer_spec

    def noted_validate(fields: object) -> ChatBody:
        threads.append(threading.current_thread())
        return validate(fields)

    def noted_specify(self: ChatBody, *given: Any) -> AnswerSpec:
        threads.append(threading.current_thread())
        return specify(self, *given)

    monkeypatch.setattr(ChatBody, "model_validate", noted_validate)
    monkeypatch.setattr(ChatBody, "answer_spec", noted_specify)
    response = request(gateway, "POST", path, {"model": "tiny"} | fields)

    assert response.status_code == 200
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    "kind", [None, "", ";", "application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_a_body_may_say_that_it_is_json_or_nothing(gateway: FakeGateway, kind: str | None) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield b'{"model": "tiny", "prompt": "Hi"}'

    headers = {} if kind is None else {"content-type": kind}
    response = request(gateway, "POST", "/v1/completions", headers=headers, content=sent())

    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_that_says_to_be_something_else_is_told_what_to_say(gateway: FakeGateway, kind: str) -> None:
    headers = {"content-type": kind}
    response = request(
        gateway, "POST", "/v1/completions", headers=headers, content='{"model": "tiny", "prompt": "Hi"}'
    )

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert f"send `content-type: application/json`, given: {kind.partition(';')[0]}" in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_compressed_body_is_refused_in_every_dialect(gateway: FakeGateway, path: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = request(gateway, "POST", path, content="{}", headers=headers)

    assert response.status_code == 415
    assert "given: `content-encoding: gzip`; send it plain" in response.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model=tiny", "Expecting value at line 1 column 1"),
        (b'{"model": "tiny",\n"prompt": "Hi', "Unterminated string starting at line 2 column 11"),
        (b'{"model": "tiny",}', "Expecting property name enclosed in double quotes at line 1 column 18"),
        (b'{"model": "\xff"}', "it must be in UTF-8"),
        (
            b'{"n": ' + b"1" * 5000 + b"}",
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
    ],
)
def test_a_body_that_says_nothing_and_is_no_json_is_told_why(
    gateway: FakeGateway, content: bytes, message: str
) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield content

    response = request(gateway, "POST", "/v1/completions", content=sent())

    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"the body is not valid JSON: {message}"


def test_a_client_that_leaves_before_its_body_has_come_is_no_error_of_ours(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        connection = Connection(b"")
        connection.is_gone.set()
        await connection.run(app_of(gateway), "/v1/completions")

    asyncio.run(scene())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_the_arguments_of_earlier_calls_have_the_limit_together(gateway: FakeGateway) -> None:
    numbers = json.dumps({"a": [1] * (json_body.MAX_VALUES // 2)})
    call = {"type": "function", "function": {"name": "f", "arguments": numbers}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call] * 3}]
    body = {"model": "tiny", "messages": messages}

    response = request(gateway, "POST", "/v1/chat/completions", body, max_body_bytes=16 << 20)

    assert response.status_code == 400
    assert f"than the limit: {json_body.MAX_VALUES}" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_other_encodings_than_utf_8_are_refused(gateway: FakeGateway, encoding: str) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield json.dumps({"model": "tiny", "prompt": "Hi"}).encode(encoding)

    response = request(
        gateway,
        "POST",
        "/v1/completions",
        headers={"content-type": "application/json"},
        content=sent(),
    )

    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the body is not valid JSON: it must be in UTF-8"
