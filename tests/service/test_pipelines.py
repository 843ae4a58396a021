"""Models that no worker can hold: what they say, how they come and go, and what happens if a member dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from hearth.store.format.manifest import WEIGHTS
from tests.service import test_cluster
from tests.service.checkpoints import write_tiny
from tests.service.harness import PATIENCE_S, Json, Service, Shelf, eventually, serving
from tests.service.test_faults import STREAMS, Told, resumed, stream_by
from tests.store.stored import flip

pytestmark = pytest.mark.e2e

NUM_TOKENS = 24
#: Greedy, with penalties, and with a grammar.
OPTIONS = [{**options, "max_tokens": NUM_TOKENS} for options in (STREAMS[0], STREAMS[3], STREAMS[5])]
#: By model: how many stages it has on workers of this memory. `small` is whole.
STAGES, MEMORY = {"mid": 2, "deep": 3}, "36MiB"
ENGINE = ("--set", "engine.max_seqs=8", "--set", "engine.max_batch_tokens=64")
DEPLOYED = (*STAGES, "small")
NUM_LAYERS = {"mid": 8, "deep": 16}


def write_deep(directory: Path, seed: int, num_layers: int) -> Path:
    """Most of its bytes are in its layers."""
    return write_tiny(directory, seed, hidden_size=32, num_layers=num_layers, intermediate_size=8192)


@pytest.fixture(scope="module")
def places(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("staged")
    found = {
        name: write_deep(root / name, seed, num_layers)
        for seed, (name, num_layers) in enumerate(NUM_LAYERS.items(), start=40)
    }
    return {**found, "small": write_tiny(root / "small", seed=43, hidden_size=16)}


@pytest.fixture(scope="module")
def whole(service: Service, places: dict[str, Path]) -> Service:
    """A service whose worker holds each of the models."""
    for name, place in places.items():
        assert service.deploy(place, name).is_success
    return service


@pytest.fixture(scope="module")
def expected(whole: Service) -> dict[str, list[Told]]:
    return {name: stream_all(whole, name) for name in STAGES}


@pytest.fixture(scope="module")
def trio(
    shelf: Shelf, places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    data_dir = shelf.copy(tmp_path_factory.mktemp("trio") / "data")
    flags = ["--workers", "3", "--memory", MEMORY, "--host-memory", "512MiB"]
    settings = ["service.heartbeat_s=0.2", "service.max_missed=50"]  # as `pair`
    settings += [f"models.{name}.context=512" for name in DEPLOYED]
    with Registry(DataDir.open(data_dir)) as registry:
        for name in DEPLOYED:
            order = DeployOrder(str(places[name]), name)
            registry.add(carry_out(order, DataDir.open(data_dir), lambda *_: None))
    with serving(
        data_dir, *ENGINE, *flags, *(word for one in settings for word in ("--set", one))
    ) as service:
        yield service


@pytest.fixture
def workers(trio: Service) -> Service:
    trio.wait_for_workers()
    return trio


def stream_all(service: Service, model: str, at_break: threading.Barrier | None = None) -> list[Told]:
    """One stream with each of `OPTIONS`; `at_break` is passed once all have begun."""
    begun = [threading.Event() for _ in OPTIONS]
    with service.client() as client, ThreadPoolExecutor(len(OPTIONS)) as threads:
        jobs = [
            threads.submit(stream_by, client, number, {**options, "model": model}, event)
            for number, (options, event) in enumerate(zip(OPTIONS, begun, strict=True))
        ]
        if at_break is not None:
            assert all(event.wait(PATIENCE_S) for event in begun)
            at_break.wait()
        return [job.result() for job in jobs]


def tell(service: Service, model: str, num_tokens: int = 8) -> str:
    with service.client() as client:
        made = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=num_tokens, temperature=0.0
        )
    return made.choices[0].text


def texts(told: list[Told]) -> list[str]:
    return [one.text for one in told]


def members(service: Service, model: str) -> list[psutil.Process]:
    """The processes that have the stages of a model, the first stage first."""
    residents = service.get("/hearth/ps")["models"]
    assert isinstance(residents, list)
    names = [one["worker"] for one in residents if isinstance(one, dict) and one["model"] == model]
    pids = {one["worker"]: one["pid"] for one in service.workers()}
    return [psutil.Process(int(str(pids[name]))) for name in names]


def used_bytes(service: Service) -> list[Json]:
    return [one["used_bytes"] for one in service.workers()]


@pytest.mark.parametrize("model", STAGES)
def test_stages_say_together_what_one_worker_says(
    workers: Service, expected: dict[str, list[Told]], model: str
) -> None:
    told = stream_all(workers, model)
    assert texts(told) == texts(expected[model])
    assert len(members(workers, model)) == STAGES[model]


def test_commands_tell_the_stages(workers: Service) -> None:
    """The model is there since the last test."""
    listed = workers.cli("ps").stdout
    assert listed.count("deep is in stages") == STAGES["deep"]
    assert listed.count("its input by shared memory") == STAGES["deep"] - 1
    assert "3, of 6 + 6 + 4 layers" in workers.cli("show", "deep").stdout
    with workers.client() as client:
        made = client.completions.create(model="deep", prompt="Hi", max_tokens=1)
    assert "shared memory, layers" in workers.cli("explain", made.id).stdout


def test_what_is_computed_from_logits_and_hidden_states_is_the_same(workers: Service, whole: Service) -> None:
    def ask(service: Service) -> tuple[list[str], list[float], list[float]]:
        with service.client() as client:
            several = client.completions.create(
                model="mid", prompt=["One day", "Two days"], max_tokens=4, temperature=0.0, logprobs=2
            )
            embedded = client.embeddings.create(model="mid", input="One day")
        logprobs = [
            value for one in several.choices for value in (one.logprobs and one.logprobs.token_logprobs) or []
        ]
        return [one.text for one in several.choices], logprobs, embedded.data[0].embedding[:8]

    found, right = ask(workers), ask(whole)
    assert found[0] == right[0]
    assert found[1] == pytest.approx(right[1], abs=1e-4)
    assert found[2] == pytest.approx(right[2], abs=1e-4)


def test_a_prefix_is_reused(workers: Service) -> None:
    def ask() -> int:
        with workers.client() as client:
            made = client.completions.create(model="mid", prompt="Again and again " * 8, max_tokens=1)
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        return made.usage.prompt_tokens_details.cached_tokens or 0

    ask()
    assert ask() > 0


def test_a_closed_stream_frees_its_slot(workers: Service) -> None:
    before = tell(workers, "mid")
    with workers.client() as client:
        parts = client.completions.create(
            model="mid", prompt="Hi", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(parts))
        parts.close()
    eventually("it is cancelled", lambda: workers.get("/hearth/ps")["num_running"] == 0)
    assert tell(workers, "mid") == before


def test_a_whole_model_runs_beside_a_stage(
    workers: Service, whole: Service, expected: dict[str, list[Told]]
) -> None:
    with ThreadPoolExecutor() as threads:
        staged = threads.submit(stream_all, workers, "mid")
        small = [tell(workers, "small", 16) for _ in range(3)]
    assert texts(staged.result()) == texts(expected["mid"])
    assert small == [tell(whole, "small", 16)] * 3


def test_a_pipeline_gives_way_as_a_whole_and_comes_back(workers: Service) -> None:
    before = tell(workers, "mid")
    tell(workers, "deep")
    assert "mid" not in workers.hosted()
    assert tell(workers, "mid") == before
    assert "deep" not in workers.hosted()


def test_stopping_a_model_frees_all_its_workers(workers: Service) -> None:
    for name in workers.residents():
        workers.unload(name, free=True)
    eventually("nothing is left", lambda: not workers.residents())
    tell(workers, "deep")
    assert all(used_bytes(workers))
    assert workers.cli("stop", "--free", "deep").returncode == 0
    eventually("its memory is free", lambda: not any(used_bytes(workers)))


def test_a_replaced_version_answers_to_its_end(
    workers: Service, whole: Service, expected: dict[str, list[Told]], places: dict[str, Path]
) -> None:
    passed = threading.Barrier(2)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(stream_all, workers, "mid", passed)
        passed.wait(PATIENCE_S)
        assert workers.deploy(places["deep"], "mid", overwrite=True).is_success
        assert tell(workers, "mid") == tell(whole, "deep")
    assert texts(running.result()) == texts(expected["mid"])
    assert workers.cli("rm", "mid", "--yes").returncode == 0
    eventually("it is gone", lambda: "mid" not in workers.residents())
    assert workers.deploy(places["mid"], "mid").is_success
    assert tell(workers, "mid") == tell(whole, "mid")


@pytest.mark.parametrize("number", range(STAGES["deep"]), ids=["first", "middle", "last"])
def test_streams_survive_each_member(workers: Service, expected: dict[str, list[Told]], number: int) -> None:
    told = disturbed(workers, "deep", number, signal.SIGKILL)
    assert texts(told) == texts(expected["deep"])
    assert resumed(workers, told)


def test_a_hanging_member_is_replaced_and_the_first_one_serves_other_models(
    workers: Service, whole: Service, expected: dict[str, list[Told]]
) -> None:
    right = tell(whole, "small")
    with ThreadPoolExecutor() as threads:
        hanging = threads.submit(disturbed, workers, "mid", 1, signal.SIGSTOP)
        while not hanging.done():
            assert tell(workers, "small") == right
    told = hanging.result()
    assert texts(told) == texts(expected["mid"])
    assert resumed(workers, told)


def disturbed(service: Service, model: str, number: int, signal_number: signal.Signals) -> list[Told]:
    """Streams in the middle of which a member of their pipeline gets a signal."""
    tell(service, model)
    member, passed = members(service, model)[number], threading.Barrier(2)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(stream_all, service, model, passed)
        passed.wait(PATIENCE_S)
        member.send_signal(signal_number)
        return running.result()


def test_killed_members_leave_nothing_behind(workers: Service) -> None:
    tell(workers, "mid")
    first = members(workers, "mid")[0]
    before = first.num_fds(), first.num_threads()

    def are_as_before() -> bool:
        return first.num_fds() <= before[0] and first.num_threads() <= before[1]

    for _ in range(3):
        members(workers, "mid")[1].kill()
        tell(workers, "mid")
        assert members(workers, "mid")[0] == first
    eventually("what belonged to them is closed", are_as_before)
    workers.wait_for_workers()
    sockets = workers.data_dir / "run"
    eventually("each worker has one socket", lambda: len(list(sockets.glob("sockets-*/w*.sock"))) == 3)


def test_a_member_that_cannot_be_loaded_fails_its_model_and_is_not_tried_for_ever(
    workers: Service, tmp_path: Path
) -> None:
    place = write_deep(tmp_path / "broken", seed=44, num_layers=NUM_LAYERS["mid"])
    assert workers.deploy(place, "broken").is_success
    flip(place / WEIGHTS, 35_000_000)  # of the last stage

    def refusal() -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            tell(workers, "broken")
        assert "broken" not in workers.hosted()
        return caught.value.message

    assert "hash" in refusal()
    eventually("all workers were tried", lambda: "it is tried again in" in refusal())
    tell(workers, "mid")


def test_a_pipeline_over_two_nodes_goes_on_with_a_third(
    shelf: Shelf,
    places: dict[str, Path],
    expected: dict[str, list[Told]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_cluster, "MEMORY", ("--memory", MEMORY, "--host-memory", "256MiB"))
    monkeypatch.setattr(test_cluster, "SMALL", ENGINE)
    cluster = test_cluster.SmallCluster(shelf, tmp_path)
    try:
        assert cluster.head.deploy(places["mid"], "mid").is_success
        for name in ("one", "two"):
            cluster.start(name)
            cluster.wait_for(name)
        # Undisturbed first, so that all streams begin together: compiling the grammar takes as long as one.
        assert texts(stream_all(cluster.head, "mid")) == texts(expected["mid"])
        found = cluster.head.get("/hearth/ps")["models"]
        assert isinstance(found, list)
        nodes = {str(one["worker"]).rpartition("/")[0] for one in found if isinstance(one, dict)}
        assert len(nodes) == STAGES["mid"]
        passed = threading.Barrier(2)
        with ThreadPoolExecutor() as threads:
            running = threads.submit(stream_all, cluster.head, "mid", passed)
            passed.wait(PATIENCE_S)
            test_cluster.kill(cluster.nodes[max(nodes)])
            told = running.result()
        assert texts(told) == texts(expected["mid"])
        assert resumed(cluster.head, told)
        cluster.close()
    finally:
        cluster.kill_nodes()
