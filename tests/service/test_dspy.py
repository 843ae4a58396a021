"""dspy against SmolLM2 and a tiny model: its default address, and one that it knows to enforce schemas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.service.harness import PATIENCE_S, Service

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network


@pytest.fixture
def provider(service: Service) -> Iterator[str]:
    """Tell dspy that schemas are enforced: of models that it does not know it assumes that they are not."""
    from dspy.lm15 import (
        AccessPolicy,
        ModelSupport,
        OpenAIChatCompat,
        ProviderDefinition,
        register_provider,
        unregister_provider,
    )

    access = AccessPolicy(provider="hearth", env_keys=("HEARTH_API_KEY",), base_url=f"{service.url}/v1")
    register_provider(
        ProviderDefinition.chat(access, compat=OpenAIChatCompat()),
        supports=ModelSupport(function_calling=True, response_schema=True),
    )
    yield "hearth"
    unregister_provider("hearth")


@pytest.mark.client("dspy", "chat")
def test_a_question_is_answered(service: Service) -> None:
    import dspy

    lm = dspy.LM(
        "openai/smollm2",
        api_base=f"{service.url}/v1",
        api_key="none",
        temperature=0.0,
        max_tokens=8,
        timeout=PATIENCE_S,
        cache=False,
        num_retries=0,
    )
    assert "Paris" in lm("What is the capital of France? Answer in one word.")[0]


@pytest.mark.client("dspy", "signatures, by the schema of a declared provider")
def test_a_signature_is_filled_in_by_its_schema(service: Service, provider: str) -> None:
    import dspy

    class Capital(dspy.Signature):
        country: str = dspy.InputField()
        city: Literal["Paris", "Rome"] = dspy.OutputField()
        districts: int = dspy.OutputField()

    lm = dspy.LM(
        f"{provider}/tiny-a", api_key="none", temperature=0.0, max_tokens=80, cache=False, num_retries=0
    )
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Capital)(country="France")

    assert found.city in ("Paris", "Rome")
    assert isinstance(found.districts, int)
