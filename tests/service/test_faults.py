"""Workers, the keeper and the gateway are killed while they serve: who asked notices a pause at most."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from openai.types import Completion

from bench.bad_server import Exchange, well
from tests.service.checkpoints import write_tiny
from tests.service.harness import PATIENCE_S, SMALL, Service, Shelf, eventually, serving
from tests.store.stored import flip
from tests.store.stored import serving as serving_files

pytestmark = pytest.mark.e2e

#: Many more than are there when the last stream begins, also where the machine is busy.
NUM_TOKENS = 130
#: A worker dies when every stream has come that far.
FIRST_TOKENS = 4
#: Enough for several turns.
NUM_TURN_TOKENS = 200
NUM_PICKS = 40
PICKS = {
    "type": "object",
    "properties": {
        "picks": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": NUM_PICKS,
            "maxItems": NUM_PICKS,
        }
    },
    "required": ["picks"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "picks", "schema": PICKS}}
#: Each with what makes going on hard: nothing, a random stream, counts, a grammar, text held back.
STREAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 200},
    {"temperature": 1.0, "seed": 7, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 8, "response_format": SCHEMA, "ignore_eos": False, "max_tokens": 400},
    {"temperature": 0.0, "stop": ["no such text at all"]},
)


@dataclass(frozen=True, slots=True)
class Told:
    answer_id: str
    text: str
    finish_reason: str | None


def stream(
    service: Service, number: int, options: dict[str, object], has_begun: threading.Event | None = None
) -> Told:
    """All of one stream; tells when its first tokens are there."""
    with service.client() as client:
        return stream_by(client, number, options, has_begun)


def stream_by(
    client: openai.OpenAI, number: int, options: dict[str, object], has_begun: threading.Event | None = None
) -> Told:
    body = {"ignore_eos": True, **options}
    text, finish_reason, answer_id = "", None, ""
    chunks = client.chat.completions.create(
        model=str(body.pop("model", "tiny-a")),
        messages=[{"role": "user", "content": str(body.pop("content", f"Tell me {number} stories."))}],
        stream=True,
        max_completion_tokens=int(str(body.pop("max_tokens", NUM_TOKENS))),
        extra_body=body,
    )
    for count, chunk in enumerate(chunks, start=1):
        answer_id = chunk.id
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
        if count == FIRST_TOKENS and has_begun is not None:
            has_begun.set()
    return Told(answer_id, text, finish_reason)


def all_streams(service: Service) -> list[Told]:
    with service.client() as client, ThreadPoolExecutor(len(STREAMS)) as threads:
        jobs = [threads.submit(stream_by, client, n, options) for n, options in enumerate(STREAMS)]
        return [job.result() for job in jobs]


@pytest.fixture(scope="module")
def undisturbed(pair: Service) -> list[Told]:
    """What the streams say when nothing happens to their worker."""
    return all_streams(pair)


def disturbed_streams(service: Service, signal_number: int) -> list[Told]:
    """The worker that has them all gets the signal in the middle of them."""
    begun = [threading.Event() for _ in STREAMS]
    # One client for all: to make one takes longer than some of the streams.
    with service.client() as client, ThreadPoolExecutor(len(STREAMS)) as threads:
        jobs = [
            threads.submit(stream_by, client, n, options, event)
            for n, (options, event) in enumerate(zip(STREAMS, begun, strict=True))
        ]
        assert begun[0].wait(PATIENCE_S)
        worker = service.worker_of("tiny-a")
        assert all(event.wait(PATIENCE_S) for event in begun)
        worker.send_signal(signal_number)
        return [job.result() for job in jobs]


def resumed(service: Service, told: list[Told]) -> list[Told]:
    """Those of some disturbed streams that went on elsewhere, each once.

    Others had ended before: where the machine is busy the last may begin late.
    """
    num_resumes = [service.explain(one.answer_id)["num_resumes"] for one in told]
    found = [one for one, num in zip(told, num_resumes, strict=True) if num == 1]
    assert found
    assert set(num_resumes) <= {0, 1}
    return found


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_streams_go_on_elsewhere_as_if_nothing_had_happened(
    undisturbed: list[Told], workers: Service, signal_number: signal.Signals
) -> None:
    disturbed = disturbed_streams(workers, signal_number)
    for was, told, options in zip(undisturbed, disturbed, STREAMS, strict=True):
        assert told.text == was.text, options
        assert told.finish_reason == was.finish_reason
    for told in resumed(workers, disturbed):
        marks = workers.explain(told.answer_id)["marks"]
        assert isinstance(marks, list)
        assert {"worker_lost", "resumed"} <= {one["what"] for one in marks if isinstance(one, dict)}
    guided = json.loads(disturbed[5].text)
    assert len(guided["picks"]) == NUM_PICKS


def test_streams_of_models_that_take_turns_survive_their_worker(workers: Service) -> None:
    def paused() -> str | None:
        return next((name for name, state in workers.states().items() if state == "paused"), None)

    with workers.client() as client, ThreadPoolExecutor(3) as threads:

        def tell(model: str) -> Told:
            options = {"model": model, "temperature": 0.0, "max_tokens": NUM_TURN_TOKENS}
            return stream_by(client, 1, options)

        undisturbed = {model: tell(model) for model in ("tiny-a", "tiny-b", "tiny-c")}

        def disturbed() -> bool:
            """Whether a stream was paused when its worker died: all may be over before one is seen paused."""
            jobs = {model: threads.submit(tell, model) for model in undisturbed}
            eventually("one is paused", lambda: paused() or all(job.done() for job in jobs.values()))
            if one := paused():
                workers.worker_of(one).kill()
            told = {model: job.result() for model, job in jobs.items()}
            for model, was in undisturbed.items():
                assert (told[model].text, told[model].finish_reason) == (was.text, "length")
            return bool(one) and workers.explain(told[one].answer_id)["num_resumes"] == 1

        eventually("a paused stream goes on", disturbed)


def test_a_request_whose_worker_died_while_loading_is_loaded_for_elsewhere(
    workers: Service, tmp_path: Path
) -> None:
    """The model lies on a server that delivers nothing until it is let go."""
    let_go = threading.Event()

    def held(exchange: Exchange) -> None:
        let_go.wait()
        well(exchange)

    def ask() -> Completion:
        with workers.client() as client:
            return client.completions.create(
                model="far", prompt="Hello", max_tokens=4, extra_body={"ignore_eos": True}
            )

    with serving_files(write_tiny(tmp_path / "tiny", seed=33)) as server:
        assert workers.deploy(f"{server.url}/tiny", "far").is_success
        server.plan.extend([held] * 100)
        try:
            with ThreadPoolExecutor() as threads:
                waiting = threads.submit(ask)
                eventually("it loads", lambda: workers.states().get("far") == "loading")
                first = workers.residents()["far"]["worker"]
                workers.worker_of("far").kill()
                eventually("it loads elsewhere", lambda: workers.residents()["far"]["worker"] != first)
                server.plan.clear()
                let_go.set()
                answer = waiting.result()
        finally:
            server.plan.clear()
            let_go.set()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert workers.explain(answer.id)["num_resumes"] == 1
        assert workers.http.delete("/hearth/models/far").is_success


def test_a_worker_that_died_is_replaced(workers: Service) -> None:
    first = workers.workers()[0]
    pid = first["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    eventually("another process stands in", lambda: workers.workers()[0]["pid"] not in (pid, 0))
    workers.wait_for_workers()
    restarts, before = workers.workers()[0]["num_restarts"], first["num_restarts"]
    assert isinstance(restarts, int)
    assert isinstance(before, int)
    assert restarts > before
    assert f"worker_forked worker={workers.workers()[0]['worker']} " in workers.logs()


def test_a_killed_template_is_replaced_and_nobody_notices(workers: Service) -> None:
    template = workers.template()
    assert template is not None
    pids, begun = [one["pid"] for one in workers.workers()], threading.Event()
    with ThreadPoolExecutor() as threads:
        running = threads.submit(stream, workers, 1, {"temperature": 0.0}, begun)
        assert begun.wait(PATIENCE_S)
        template.kill()
        told = running.result()
    assert workers.explain(told.answer_id)["num_resumes"] == 0
    assert [one["pid"] for one in workers.workers()] == pids

    def is_replaced() -> bool:
        found = workers.template()
        return found is not None and found.pid != template.pid

    eventually("another template stands in", is_replaced)
    eventually("it is ready", lambda: workers.get("/hearth/ps")["notes"] == [])


def test_the_keeper_comes_back_and_models_load_again(workers: Service) -> None:
    before = stream(workers, 1, {"temperature": 0.0, "max_tokens": 8}).text
    workers.unload("tiny-a", free=True)
    eventually("it has left", lambda: not workers.residents())
    keeper = workers.keeper()
    assert keeper is not None
    keeper.kill()

    def is_replaced() -> bool:
        found = workers.keeper()
        return found is not None and found.pid != keeper.pid

    eventually("another keeper stands in", is_replaced)

    def told_again() -> str | None:
        """The new one may need a moment until it lends."""
        try:
            return stream(workers, 1, {"temperature": 0.0, "max_tokens": 8}).text
        except openai.APIError:
            return None

    assert eventually("it answers", told_again) == before


def test_a_model_whose_weights_were_changed_is_not_served_and_others_are(
    workers: Service, tmp_path: Path
) -> None:
    place = write_tiny(tmp_path / "flipped", seed=30)
    assert workers.deploy(place, "flipped").is_success
    flip(place / "weights.bin", 5_000_000)
    assert_refused(workers, "flipped", "hash")
    assert stream(workers, 1, {"max_tokens": 2}).finish_reason == "length"


def test_a_model_that_was_replaced_by_another_is_not_served(workers: Service, tmp_path: Path) -> None:
    place = write_tiny(tmp_path / "replaced", seed=31)
    other = write_tiny(tmp_path / "other", seed=32)
    assert workers.deploy(place, "replaced").is_success
    for name in ("manifest.json", "weights.bin"):
        shutil.copy(other / name, place / name)
    assert_refused(workers, "replaced", "changed since it was deployed")
    assert stream(workers, 1, {"max_tokens": 2}).finish_reason == "length"


def assert_refused(service: Service, model: str, reason: str) -> None:
    with service.client() as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=model, prompt="Hi", max_tokens=1)
    assert caught.value.status_code >= 500 or caught.value.status_code == 422
    assert reason in caught.value.message
    assert model not in service.states()
    assert service.http.delete(f"/hearth/models/{model}").is_success


@pytest.fixture(scope="module")
def heir(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service on the data directory of one whose gateway was killed in the middle of a stream."""
    data_dir = shelf.copy(tmp_path_factory.mktemp("heir") / "data")
    flags = (*SMALL, "--memory", "256MiB", "--host-memory", "64MiB", "--set", f"service.drain_s={PATIENCE_S}")
    service = Service(data_dir, *flags)
    with service.client() as client:
        chunks = client.completions.create(
            model="tiny-a", prompt="Hi", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(chunks))
        service.worker_of("tiny-a").send_signal(signal.SIGSTOP)  # it does not heed the end of its input
        service.kill()
        chunks.close()
    service.assert_journal_replays()
    with serving(data_dir, *flags) as heir:
        yield heir


def test_after_a_killed_gateway_nothing_runs_and_a_new_one_has_all_models(
    heir: Service, shelf: Shelf
) -> None:
    assert {model["name"] for model in heir.http.get("/hearth/models").json()} == set(shelf.places)
    assert stream(heir, 1, {"max_tokens": 2}).finish_reason == "length"


def test_sigterm_lets_streams_finish_and_takes_nothing_new(heir: Service) -> None:
    service, data_dir = heir, heir.data_dir
    children = service.children()
    begun = threading.Event()
    with ThreadPoolExecutor() as threads, service.client() as client:
        client.models.list()  # so that it is connected, and asks before the stream has ended
        running = threads.submit(stream, service, 1, {"temperature": 0.0, "max_tokens": 500}, begun)
        assert begun.wait(PATIENCE_S)
        service.terminate()
        eventually("it drains", lambda: service.http.get("/health").json()["status"] == "draining")
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny-a", prompt="Hi", max_tokens=1)
        assert caught.value.status_code == 503
        told = running.result()
    assert told.finish_reason == "length"
    while service.process.poll() is None:  # whoever is impatient changes nothing about how it ends
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    assert service.stop() == 0
    assert not [child for child in children if psutil.pid_exists(child.pid) and child.is_running()]
    assert not (data_dir / "run" / "service.json").exists()


def test_a_stream_that_outlasts_the_drain_is_told_why_it_ends(workers: Service) -> None:
    """The last test that uses these workers: it ends their service."""
    service = workers
    body = {"model": "tiny-a", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with service.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        service.terminate()
        said = [line for line in lines if line]
    assert "shutting_down" in said[-1]
    assert service.stop() == 0
