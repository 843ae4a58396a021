"""Adapters of a running service: deployed, asked for beside their base, replaced and removed while in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from tests.service.checkpoints import write_lora
from tests.service.harness import Service

pytestmark = pytest.mark.e2e

BASE, NAMES = "tiny-a", ("first", "second")
#: Trained to answer everything with the same words (`tests/data/train_parrot.py`).
PARROT = Path(__file__).parents[1] / "data" / "smollm2-parrot"


@pytest.fixture
def adapters(service: Service, tmp_path: Path) -> Iterator[Path]:
    """`first` and `second`, and where their files are. Deployed without a process of its own for each."""
    for seed, name in enumerate(NAMES, start=1):
        put(service, write_lora(tmp_path / name, seed), name)
    yield tmp_path
    for name in NAMES:
        service.http.delete(f"/hearth/models/{name}")


def put(service: Service, source: Path, name: str) -> None:
    data_dir = DataDir(service.data_dir)
    order = DeployOrder(str(source), name, base=BASE, overwrite=True)
    with Registry(data_dir) as registry:
        registry.replace(carry_out(order, data_dir, lambda *_: None))


def stream(service: Service, model: str, max_tokens: int = 12) -> str:
    """Ask a model, which answers under its own name."""
    with service.client() as client:
        chunks = list(
            client.completions.create(
                model=model, prompt="Once upon a time", max_tokens=max_tokens, temperature=0, stream=True
            )
        )
    assert {chunk.model for chunk in chunks} == {model}
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.usefixtures("adapters")
def test_two_adapters_and_their_base_answer_at_once_and_are_told_of_by_name(service: Service) -> None:
    names = (BASE, *NAMES)
    with ThreadPoolExecutor(len(names)) as threads:
        together = list(threads.map(lambda name: stream(service, name), names))
    assert together == [stream(service, name) for name in names]
    assert len(set(together)) == len(names)

    answer = service.http.post("/v1/completions", json={"model": "first", "prompt": "Hi", "max_tokens": 1})
    explained = service.explain(answer.headers["x-request-id"])
    assert (explained["model"], explained["base"], explained["adapter_tier"]) == ("first", BASE, "device")
    shown = service.cli("explain", answer.headers["x-request-id"]).stdout
    assert f"an adapter of {BASE}, already on the device" in shown

    adapters = service.residents()[BASE]["adapters"]
    assert isinstance(adapters, list)
    there = {str(one["name"]) for one in adapters if isinstance(one, dict) and one["num_bytes"]}
    assert there >= set(NAMES)
    assert "  + second" in service.cli("ps").stdout
    metrics = service.metrics()
    assert metrics["hearth_adapter_load_seconds_count"] >= 2
    assert metrics["hearth_adapters_resident"] >= 2


def test_another_version_under_the_same_name_answers_otherwise(service: Service, adapters: Path) -> None:
    """Asked with the same prompt: what is cached of the first must not be found for the second."""
    before, expected = (stream(service, name) for name in NAMES)
    put(service, adapters / "second", "first")

    assert stream(service, "first") == expected != before


@pytest.mark.usefixtures("adapters")
def test_requests_of_an_adapter_that_is_removed_end_as_if_it_were_there(service: Service) -> None:
    with service.client() as client:
        running = client.completions.create(
            model="first",
            prompt="Once upon a time",
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(iter(running))
        assert service.http.delete("/hearth/models/first").is_success

        refused = service.http.post("/v1/completions", json={"model": "first", "prompt": "Hi"})
        assert refused.status_code == 404
        last = [first, *running][-1]
    assert last.choices[0].finish_reason == "length"
    adapters = service.residents()[BASE]["adapters"]
    assert isinstance(adapters, list)
    assert "first" not in {one["name"] for one in adapters if isinstance(one, dict)}, "its memory stays"


def test_every_answer_is_of_one_version_while_versions_come_and_go(service: Service, adapters: Path) -> None:
    """One name means one adapter, then the other, then none; what was accepted ends, as it began."""
    texts = {name: stream(service, name) for name in NAMES}
    is_over = threading.Event()

    def ask(_: int) -> list[str]:
        told = []
        while not is_over.is_set():
            with suppress(openai.NotFoundError):
                told.append(stream(service, "mine"))
        return told

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        try:
            for number in range(12):
                if number % 3 == 2:
                    assert service.http.delete("/hearth/models/mine").is_success
                else:
                    put(service, adapters / NAMES[number % 2], "mine")
                time.sleep(0.1)  # some ask meanwhile
        finally:
            is_over.set()
        told = [text for one in asking for text in one.result()]

    assert told
    assert set(told) <= set(texts.values())
    answer = service.http.post("/v1/completions", json={"model": "mine", "prompt": "Hi"})
    assert answer.status_code == 404
    residents = service.residents()[BASE]["adapters"]
    assert isinstance(residents, list)
    assert not any(one["name"] == "mine" and one["num_running"] for one in residents if isinstance(one, dict))


def test_what_an_adapter_was_trained_to_say_can_be_read(service: Service) -> None:
    def ask(model: str) -> str:
        with service.client() as client:
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "What do you have for breakfast?"}],
                max_tokens=16,
                temperature=0,
            )
        return answer.choices[0].message.content or ""

    answer = service.deploy(PARROT, "parrot", base="smollm2")
    assert answer.status_code == 200, answer.text
    try:
        assert "Polly wants a cracker" in ask("parrot")
        assert "Polly" not in ask("smollm2")
    finally:
        service.http.delete("/hearth/models/parrot")
