"""/tokenize and /detokenize, over a gateway with a script and real tokenizers."""

from __future__ import annotations

import pytest

from hearth.control.requests.generation import ChatPrompt
from tests.api.conftest import request
from tests.api.fake import FakeGateway, FakeKeys

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_text_becomes_tokens_and_is_text_again(gateway: FakeGateway) -> None:
    body = {"model": "tiny", "prompt": "Héllo", "return_token_strs": True}
    answer = request(gateway, "POST", "/tokenize", body).json()
    tokens = gateway.tokenizer_.encode("Héllo")
    names = [gateway.tokenizer_.token(token) for token in tokens]
    assert answer == {"count": len(tokens), "max_model_len": 2048, "tokens": tokens, "token_strs": names}

    back = request(gateway, "POST", "/detokenize", {"model": "tiny", "tokens": tokens})
    assert back.json() == {"prompt": "Héllo"}


def test_a_conversation_becomes_the_tokens_of_the_prompt_that_chat_would_have(gateway: FakeGateway) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "add_generation_prompt": False}
    answer = request(gateway, "POST", "/tokenize", body).json()
    assert answer["tokens"] == gateway.tokenizer_.encode("user: Hi\n")
    assert answer["token_strs"] is None
    (prompt,) = gateway.encoded
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.has_turn


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "`prompt`: field required"),
        ("/tokenize", {"prompt": 5}, "`prompt`: input should be a valid string"),
        ("/tokenize", {"messages": []}, "`messages`: list should have at least 1 item"),
        ("/tokenize", {"messages": MESSAGES, "prompt": "Hi"}, "send `messages` alone"),
        ("/detokenize", {}, "`tokens`: field required"),
        ("/detokenize", {"tokens": [-1]}, "`tokens"),
    ],
)
def test_a_wrong_body_is_told_its_fault(
    gateway: FakeGateway, path: str, fields: dict[str, object], message: str
) -> None:
    response = request(gateway, "POST", path, {"model": "tiny"} | fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_key_is_needed_where_keys_are(gateway: FakeGateway, path: str) -> None:
    gateway.keys = FakeKeys()
    body = {"model": "tiny", "prompt": "Hi", "tokens": [5]}
    assert request(gateway, "POST", path, body).status_code == 401
    key = {"authorization": "Bearer user-key"}
    assert request(gateway, "POST", path, body, headers=key).status_code == 200
