"""instructor against a tiny model in its default mode, which demands the call of a tool."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.service.harness import Service

pytestmark = pytest.mark.e2e


class City(BaseModel):
    name: Literal["Paris", "London", "Rome"]
    districts: int = Field(ge=1, le=99)


@pytest.mark.client("instructor", "structured output in the default mode")
def test_a_model_of_pydantic_comes_back_by_the_default_mode(service: Service) -> None:
    import instructor

    with service.client() as plain:
        found = instructor.from_openai(plain).chat.completions.create(
            model="tiny-a",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            response_model=City,
            max_retries=0,
            temperature=0,
            max_tokens=40,
        )

    assert isinstance(found, City)
