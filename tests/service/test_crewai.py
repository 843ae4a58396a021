"""CrewAI against SmolLM2: a crew of one agent.

Not a dev dependency: it needs mcp below 2, beside which litellm calls no tools. Tested where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.harness import PATIENCE_S, Service

pytestmark = [
    pytest.mark.e2e,
    # A module of its own that refuses attributes, which importing a child sets.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Cannot set an attribute on 'crewai.rag':ImportWarning"),
]


@pytest.mark.client("crewai", "a crew of one agent")
def test_a_crew_carries_out_its_task(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    pytest.importorskip("crewai", reason="CrewAI is not installed")
    from crewai import LLM, Agent, Crew, Task

    llm = LLM(
        model="openai/smollm2",
        base_url=f"{service.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=12,
        timeout=PATIENCE_S,
        max_retries=0,
    )
    agent = Agent(role="guide", goal="answer", backstory="You know cities.", llm=llm, max_iter=1)
    task = Task(description="What is the capital of France?", expected_output="a city", agent=agent)

    assert "Paris" in Crew(agents=[agent], tasks=[task]).kickoff().raw
