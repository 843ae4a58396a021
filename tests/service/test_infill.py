"""Official clients fill in the middle: a tiny model whose tokenizer has StarCoder's tokens for that."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import openai
import pytest

from tests.service.checkpoints import write_with_marks
from tests.service.harness import PATIENCE_S, Service, Shelf

pytestmark = pytest.mark.e2e

MODEL, PREFIX, SUFFIX = "coder", "def add(a, b):\n    return", "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module", autouse=True)
def coder(service: Service, shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = write_with_marks(shelf.places["tiny-a"], tmp_path_factory.mktemp("models") / MODEL)
    deployed = service.deploy(place, MODEL)
    assert deployed.status_code == 200, deployed.text
    yield
    assert service.http.delete(f"/hearth/models/{MODEL}").is_success


def between(service: Service) -> str:
    """The answer to the prompt as the model was trained to see it."""
    prompt = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"
    with service.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
    return answer.choices[0].text


@pytest.mark.client("openai", "`suffix`, of models that can fill in the middle")
def test_a_suffix_asks_for_the_text_between(service: Service) -> None:
    fields = {"model": MODEL, "prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "max_tokens": 12}
    with service.client() as client:
        whole = client.completions.create(**fields)  # type: ignore[call-overload] # plain
        stream = client.completions.create(**fields, stream=True)  # type: ignore[call-overload] # plain
        pieces = [chunk.choices[0].text for chunk in stream]

    assert whole.choices[0].text == "".join(pieces) == between(service)
    assert whole.choices[0].text


@pytest.mark.client("openai", "`suffix` of others", refused="has no token for it: `<|fim_prefix|>`")
def test_other_models_refuse_a_suffix(service: Service, refusal: str) -> None:
    with service.client() as client, pytest.raises(openai.BadRequestError, match=refusal):
        client.completions.create(model="tiny-a", prompt=PREFIX, suffix=SUFFIX)


@pytest.mark.client("ollama", "`suffix` of generate, `insert` among the capabilities")
def test_ollama_inserts(service: Service) -> None:
    client = ollama.Client(service.url, timeout=PATIENCE_S)

    answer = client.generate(MODEL, PREFIX, SUFFIX, options={"temperature": 0, "num_predict": 12})

    assert answer.response == between(service)
    assert "insert" in (client.show(MODEL).capabilities or [])
    client._client.close()
