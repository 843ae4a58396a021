"""Two replicas that run out of KV in a burst give up layers for it, and have them back: nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from openai.types import Completion

from bench.drop.cpu import MODEL
from bench.random_model import write_random
from bench.service.streams import Prompts
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from tests.service.harness import Json, Service, eventually, serving
from tests.service.test_faults import STREAMS
from tests.service.test_pipelines import members

pytestmark = pytest.mark.e2e

NAME = "deep"
#: Room for some 960 tokens of KV on each worker, of 2,560 that the burst needs.
MEMORY = "20MiB"
NUM_REQUESTS, NUM_PROMPT, NUM_TOKENS = 20, 48, 80
PROMPTS = Prompts(512, NUM_PROMPT).take(NUM_REQUESTS)
#: Greedy, with a random stream, with counts and a random stream, and with counts.
OPTIONS = [STREAMS[at] for at in (0, 1, 3, 4)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("two")
    place = write_random(root / NAME, MODEL, "float32", 1, torch.device("cpu"))
    data_dir = DataDir.open(root / "data")
    with Registry(data_dir) as registry:
        registry.add(carry_out(DeployOrder(str(place), NAME), data_dir, lambda *_: None))
    settings = ["context=256", "min_replicas=2", "max_replicas=2", 'drop="auto"']
    flags = [word for one in settings for word in ("--set", f"models.{NAME}.{one}")]
    flags += ["--set", "engine.max_seqs=64", "--workers", "2", "--memory", MEMORY]
    with serving(data_dir.path, *flags) as service:
        yield service


@pytest.fixture
def replicas(two: Service) -> Service:
    """Both workers have all of the model."""
    two.wait_for_workers()
    eventually("both replicas are whole", lambda: [one["layers"] for one in residents(two)] == [None, None])
    return two


@pytest.fixture(scope="module")
def expected(two: Service) -> list[str]:
    """What requests say that have enough memory."""
    eventually("both replicas are there", lambda: len(residents(two)) == 2)
    with two.client() as client, ThreadPoolExecutor(4) as threads:
        told = list(threads.map(lambda number: tell(client, number), range(NUM_REQUESTS)))
    assert "dropped" not in {two.explain(one.id)["why"] for one in told}
    return texts(told)


def residents(service: Service) -> list[dict[str, Json]]:
    found = service.get("/hearth/ps")["models"]
    assert isinstance(found, list)
    return [one for one in found if isinstance(one, dict) and one["model"] == NAME and one["is_hosted"]]


def is_dropped(service: Service) -> bool:
    return any(one["is_dropped"] for one in residents(service))


def tell(client: openai.OpenAI, number: int) -> Completion:
    made = client.completions.create(
        model=NAME,
        prompt=PROMPTS[number],
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, **OPTIONS[number % len(OPTIONS)]},
    )
    assert made.choices[0].finish_reason == "length"
    return made


def texts(told: Iterable[Completion]) -> list[str]:
    return [one.choices[0].text for one in told]


def burst(service: Service, disturb: Callable[[], None] = lambda: None) -> list[Completion]:
    """Return the answers to requests that come at once, and `disturb` them."""
    # One client for all: while each thread makes one, the first requests end.
    with service.client() as client, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        jobs = [threads.submit(tell, client, number) for number in range(NUM_REQUESTS)]
        disturb()
        return [job.result() for job in jobs]


def test_requests_say_the_same_when_layers_go_and_when_they_come_back(
    expected: list[str], replicas: Service
) -> None:
    def see() -> None:
        eventually(
            "both are groups", lambda: [one["is_dropped"] for one in residents(replicas)] == [True, True]
        )

    told = burst(replicas, see)
    with replicas.client() as client, ThreadPoolExecutor(3) as threads:

        def tell_until_restored(number: int) -> list[Completion]:
            told = [tell(client, number)]
            while is_dropped(replicas):
                told.append(tell(client, number))
            return told

        # So that some run when the layers come back, if those of the burst did not.
        told_by_thread = list(threads.map(tell_until_restored, range(3)))
    assert texts(told) == expected
    for number, later in enumerate(told_by_thread):
        assert set(texts(later)) == {expected[number]}
        told.append(later[-1])
    assert {"dropped", "restored"} <= {replicas.explain(one.id)["why"] for one in told}


@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
def test_requests_go_on_when_a_member_is_killed(expected: list[str], replicas: Service, number: int) -> None:
    def kill() -> None:
        eventually("layers were given up", lambda: is_dropped(replicas))
        members(replicas, NAME)[number].kill()

    assert texts(burst(replicas, kill)) == expected
