"""A worker's process beside a keeper's: models come and go, requests are answered, whatever breaks."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch
from tokenizers import Tokenizer as Backend

from hearth import LLM
from hearth.core.errors import EngineFailed
from hearth.core.messages import (
    CancelRequest,
    HostingFailed,
    LoadProgress,
    ModelLoaded,
    Ping,
    Pong,
    RetireModel,
    Shutdown,
    StartRequest,
    StepDone,
)
from hearth.core.sizes import StepLimits
from hearth.core.types import FinishReason, GuideSpec, Hold, ModelId, Pace, Pooling, SamplingParams
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTerms
from hearth.store.format.convert import convert
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.store.transfer import lease
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.transfer import Loader
from hearth.worker.hosted_model import HostedModel
from hearth.worker.model_load import HostingNews
from hearth.worker.runs import _checked
from hearth.worker.runtime import HostingResources
from hearth.worker.weights_transfer import ModelBroken
from tests.completions import completions
from tests.models.zoo import build, save, tiny
from tests.store.stored import converted, flip
from tests.text.conftest import byte_level
from tests.worker.harness import (
    BUDGET_BYTES,
    CONFIG,
    PATIENCE_S,
    Gateway,
    Rig,
    folder,
    greedy,
    host_order,
    keeper_setup,
    keeping,
    working,
)
from tests.worker.in_process import working_beside

pytestmark = pytest.mark.e2e

PROMPT = (3, 14, 15, 92, 65, 35)


@dataclass(frozen=True, slots=True)
class Keeper:
    pid: int
    socket: str


def held_bytes(*pids: int) -> int:
    """Memory that processes have for themselves or share between them, which counts once."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8") for pid in pids]
    lines = [line.split() for rollup in rollups for line in rollup.splitlines()]
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))


def until_held(pids: tuple[int, ...], most_bytes: int) -> int:
    """Wait until processes hold no more; the keeper hears of a chunk's release a moment after the copy."""
    give_up_s = time.monotonic() + PATIENCE_S
    while (found := held_bytes(*pids)) > most_bytes and time.monotonic() < give_up_s:
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    with folder() as place, keeping(setup := keeper_setup(place)) as process:
        yield Keeper(process.pid, setup.socket)


@pytest.fixture(scope="module")
def rig(keeper: Keeper) -> Iterator[Rig]:
    """Shared: a test leaves the worker as it found it, with no model."""
    with (
        Path("/dev/zero").open("rb") as not_for_it,
        working(keeper.socket, others=(not_for_it.fileno(),)) as rig,
    ):
        yield rig


def test_a_worker_that_was_spawned_has_no_descriptors_but_its_own(rig: Rig) -> None:
    place = Path(f"/proc/{rig.worker.pid}/fd")
    assert "/dev/zero" not in {str(one.readlink()) for one in place.iterdir()}


def is_empty(gateway: Gateway) -> bool:
    pong = gateway.ping()
    return pong.free_bytes == pong.budget_bytes


@pytest.fixture
def gateway(rig: Rig) -> Iterator[Gateway]:
    yield rig.gateway
    rig.gateway.drop(*(use.model for use in rig.gateway.ping().models))
    assert is_empty(rig.gateway)


@pytest.fixture(scope="module")
def model() -> Path:
    return converted("llama-gqa")


def answer(where: Path, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """What the offline API says."""
    with LLM(where, device="cpu", max_model_len=64, engine=CONFIG, skip_tokenizer_init=True) as llm:
        (completion,) = completions(llm, [prompt], params)
        return completion.token_ids


def test_says_what_it_has_when_it_is_ready(rig: Rig) -> None:
    hello = rig.gateway.hello

    assert hello is not None
    assert (hello.pid, hello.kind, hello.budget_bytes) == (rig.worker.pid, "cpu", BUDGET_BYTES)
    assert hello.device


def test_a_model_is_loaded_and_answers_as_it_does_offline(gateway: Gateway, model: Path) -> None:
    loaded = gateway.host("a", model)
    (run,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))

    assert isinstance(loaded, ModelLoaded), loaded
    assert sum(rung.num_bytes for rung in loaded.rungs) == read_manifest(model).num_bytes
    assert run.tokens == answer(model, PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    assert run.finish_reason is FinishReason.LENGTH


def test_a_prefix_is_found_by_those_alone_who_have_its_salt(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    prompt = tuple(range(40))

    def num_cached_tokens(salt: bytes, output: tuple[int, ...] = ()) -> int:
        run = gateway.start("a", prompt, greedy(len(output) + 1), output, salt=salt)
        return gateway.until_ended(run)[0].num_cached_tokens

    assert num_cached_tokens(b"alice") == 0
    assert num_cached_tokens(b"bob") == 0
    assert num_cached_tokens(b"alice") >= 16
    assert num_cached_tokens(b"bob", output=(7,)) >= 16  # as when it is resumed here


def test_on_a_cpu_a_model_is_held_once_and_given_back_to_the_system(
    gateway: Gateway, rig: Rig, keeper: Keeper
) -> None:
    """By what the kernel says of both processes, with a model that is larger than what else they take."""
    where = converted("llama-wide", chunk_bytes=16 << 20)
    pids, num_bytes = (keeper.pid, rig.worker.pid), read_manifest(where).num_bytes
    gateway.host("first", converted("llama-gqa"))  # what any model leaves behind is there already
    gateway.until_ended(gateway.start("first", PROMPT, greedy(2)))
    gateway.drop("first")
    gateway.ping()
    before_bytes = held_bytes(*pids)

    gateway.host("a", where)
    gateway.until_ended(gateway.start("a", PROMPT, greedy(8)))
    loaded_bytes = until_held(pids, before_bytes + num_bytes * 5 // 4)
    gateway.drop("a")
    gateway.ping()
    left_bytes = until_held(pids, before_bytes + num_bytes // 4)

    told = f"{before_bytes=} {loaded_bytes=} {left_bytes=}"
    assert loaded_bytes - before_bytes <= num_bytes * 5 // 4, told
    assert left_bytes - before_bytes <= num_bytes // 4, told
    assert loaded_bytes - left_bytes >= num_bytes * 3 // 4, (
        told
    )  # some of the first model may have been left before


def test_requests_that_come_with_the_model_run_when_it_is_there(gateway: Gateway, model: Path) -> None:
    gateway.send(host_order("a", model))
    runs = [gateway.start("a", PROMPT[:length], greedy(8)) for length in (2, 4, 6)]

    ended = gateway.until_ended(*runs)

    for length, run in zip((2, 4, 6), ended, strict=True):
        assert run.tokens == answer(model, PROMPT[:length], SamplingParams(temperature=0.0, max_tokens=8))
        assert run.num_admissions == 1


def test_a_narrow_model_is_widened_on_a_cpu(gateway: Gateway) -> None:
    narrow = converted("qwen2", dtype="bfloat16")
    gateway.send(host_order("narrow", narrow))
    (run,) = gateway.until_ended(gateway.start("narrow", PROMPT, greedy(12)))

    assert run.tokens == answer(narrow, PROMPT, SamplingParams(temperature=0.0, max_tokens=12))
    loaded = next(fact for fact in gateway.facts if isinstance(fact, ModelLoaded) and fact.model == "narrow")
    assert loaded.first_layer_s == loaded.total_s


def test_seeded_sampling_with_logprobs_is_as_offline(gateway: Gateway, model: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=10, logprobs=2)
    gateway.host("a", model)
    gateway.facts.clear()
    (run,) = gateway.until_ended(gateway.start("a", PROMPT, params))
    logprobs = [fact.logprobs for fact in gateway.facts if isinstance(fact, StepDone) and fact.tokens]

    assert run.tokens == answer(model, PROMPT, params)
    assert all(one is not None and one[0] is not None and len(one[0].top) == 2 for one in logprobs)


def test_each_request_of_a_batch_gets_the_logprobs_it_asked_for(gateway: Gateway, model: Path) -> None:
    wishes = (1, 20, None, 0)
    params = [SamplingParams(temperature=0.0, max_tokens=4, logprobs=wish) for wish in wishes]
    gateway.host("a", model)
    gateway.facts.clear()
    runs = [gateway.start("a", PROMPT, each) for each in params]
    gateway.until_ended(*runs)

    told: dict[int, set[int | None]] = {run: set() for run in runs}
    for fact in gateway.facts:
        if isinstance(fact, StepDone):
            for run, one in zip(fact.runs, fact.logprobs or [None] * len(fact.runs), strict=True):
                told[run].add(None if one is None else len(one.top))
    assert list(told.values()) == [{wish} for wish in wishes]


def test_embeddings_come_with_the_end_of_their_runs_beside_those_that_are_continued(
    gateway: Gateway, model: Path
) -> None:
    gateway.host("a", model)
    nothing = SamplingParams(temperature=0.0, max_tokens=0)
    runs = [gateway.start("a", PROMPT, nothing, pooling=pooling) for pooling in Pooling]
    last, mean, continued = gateway.until_ended(*runs, gateway.start("a", PROMPT, greedy(8)))

    states = build("llama-gqa").model.base_model(torch.tensor([PROMPT])).last_hidden_state[0]
    for run, expected in ((last, states[-1]), (mean, states.mean(0))):
        assert run.reading is not None
        assert run.reading.embedding is not None
        vector = torch.frombuffer(bytearray(run.reading.embedding), dtype=torch.float32)
        torch.testing.assert_close(vector, expected / expected.norm(), atol=2e-5, rtol=1e-4)
        assert run.finish_reason is FinishReason.LENGTH
    assert continued.reading is None
    assert continued.tokens == answer(model, PROMPT, SamplingParams(temperature=0.0, max_tokens=8))


def test_two_models_step_side_by_side(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    gateway.host("b", converted("opt-pre"))
    gateway.facts.clear()
    with gateway.at_once():
        runs = [gateway.start(name, PROMPT, greedy(40)) for name in ("a", "b")]
    gateway.until_ended(*runs)

    steps: list[str] = [fact.model for fact in gateway.facts if isinstance(fact, StepDone)]
    both = steps[steps.index("b") : len(steps) - steps[::-1].index("a")]
    assert {"a", "b"} == set(both)
    assert steps != sorted(steps)


def test_all_tokens_of_a_step_come_in_one_message(gateway: Gateway, model: Path) -> None:
    gateway.facts.clear()
    with gateway.at_once():
        gateway.send(host_order("a", model))
        runs = [gateway.start("a", PROMPT, greedy(10)) for _ in range(4)]
    gateway.until_ended(*runs)

    assert max(len(fact.runs) for fact in gateway.facts if isinstance(fact, StepDone)) == 4


def test_the_time_of_steps_with_nothing_to_tell_is_told_by_the_next(gateway: Gateway, model: Path) -> None:
    """The first chunk of a prompt is told for its admission, the last for its token, no other one is."""
    limits = StepLimits(max_batch_tokens=4, max_seqs=1, block_tokens=4)
    gateway.send(host_order("a", model, limits=limits))
    gateway.facts.clear()
    gateway.until_ended(gateway.start("a", [1, 2, 3, 4] * 5, greedy(2)))

    steps = [fact for fact in gateway.facts if isinstance(fact, StepDone)]
    assert [step.busy_s > step.step_s for step in steps] == [False, True, False]


def test_a_model_runs_as_many_requests_at_a_time_as_its_order_says_also_when_it_comes_back(
    gateway: Gateway, model: Path
) -> None:
    for max_seqs in (2, 5):
        limits = StepLimits(max_batch_tokens=64, max_seqs=max_seqs, block_tokens=4)
        gateway.send(host_order("a", model, limits=limits))
        gateway.facts.clear()
        with gateway.at_once():
            runs = [gateway.start("a", PROMPT, greedy(10)) for _ in range(6)]
        gateway.until_ended(*runs)
        steps = [len(fact.runs) for fact in gateway.facts if isinstance(fact, StepDone)]
        assert max(steps) == max_seqs
        gateway.send(RetireModel(ModelId("a")))


def test_a_batch_request_gives_its_slot_to_an_interactive_one_and_goes_on_later(
    gateway: Gateway, model: Path
) -> None:
    gateway.host("a", model, limits=StepLimits(max_batch_tokens=64, max_seqs=1, block_tokens=4))
    with gateway.at_once():
        batch = gateway.start("a", PROMPT, greedy(40), pace=Pace(tokens_per_s=0.0))
        interactive = gateway.start("a", PROMPT[::-1], greedy(3))
    gateway.until_ended(interactive)
    assert gateway.runs[batch].finish_reason is None
    (ended,) = gateway.until_ended(batch)
    assert ended.tokens == answer(model, PROMPT, SamplingParams(temperature=0.0, max_tokens=40))


def test_the_model_s_end_tokens_end_its_answers(gateway: Gateway, model: Path) -> None:
    tokens = answer(model, PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    gateway.host("a", model, eos_ids=(tokens[4],))

    (run,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(20)))

    assert run.finish_reason is FinishReason.STOP
    assert run.tokens == tokens[: tokens.index(tokens[4]) + 1]


def test_a_request_goes_on_from_what_another_worker_emitted(gateway: Gateway, model: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=16, presence_penalty=0.5)
    whole = answer(model, PROMPT, params)
    gateway.host("a", model)

    runs = [gateway.start("a", PROMPT, params, whole[:cut]) for cut in (1, 7, 15)]

    for cut, run in zip((1, 7, 15), gateway.until_ended(*runs), strict=True):
        assert whole[:cut] + run.tokens == whole


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    place = tmp_path_factory.mktemp("spoken")
    save(tiny("llama-gqa", vocab_size=640), place / "source")
    byte_level().save(str(place / "source" / "tokenizer.json"))
    convert(place / "source", place / "model")
    return place / "model"


def test_a_guided_answer_is_what_its_schema_says(gateway: Gateway, spoken: Path) -> None:
    backend = Backend.from_file(str(spoken / "tokenizer.json"))
    end = backend.token_to_id("</s>")
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    gateway.send(host_order("a", spoken, eos_ids=(end,)))
    guided = gateway.start("a", PROMPT, greedy(40), guide=GuideSpec("json_schema", schema))
    free = gateway.start("a", PROMPT, greedy(10))
    broken = gateway.start("a", PROMPT, greedy(10), guide=GuideSpec("lark", "start: nothing"))
    gateway.until_ended(guided, free, broken)

    assert json.loads(backend.decode(gateway.runs[guided].tokens)) in ({"a": 1}, {"a": 2})
    assert gateway.runs[guided].finish_reason is FinishReason.STOP
    assert len(gateway.runs[free].tokens) == 10
    failed = gateway.runs[broken].failed
    assert failed is not None
    assert failed.label == "bad_guide"


def test_a_request_whose_logits_are_not_finite_fails_alone(
    gateway: Gateway, tmp_path: Path, model: Path
) -> None:
    broken = tiny("llama-gqa")
    with torch.no_grad():
        broken.get_input_embeddings().weight[9] = torch.nan
    save(broken, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "model")
    gateway.send(host_order("a", tmp_path / "model"))
    runs = [gateway.start("a", prompt, greedy(8)) for prompt in (PROMPT, (*PROMPT, 9), PROMPT[:3])]

    sound, failed, other = gateway.until_ended(*runs)

    assert failed.tokens == []
    assert failed.failed is not None
    assert failed.failed.label == "logits_not_finite"
    assert "after 7 tokens of prompt and 0 of output" in failed.failed.reason
    for length, run in ((6, sound), (3, other)):
        assert run.tokens == answer(model, PROMPT[:length], SamplingParams(temperature=0.0, max_tokens=8))
    (use,) = gateway.ping().models
    assert (use.num_running, use.num_waiting, use.kv_used_blocks) == (0, 0, 0)


def test_a_request_whose_schema_cannot_be_followed_fails_alone(gateway: Gateway, spoken: Path) -> None:
    kinds = [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(3)}} for i in range(200)]
    guide = GuideSpec("json_schema", json.dumps({"anyOf": kinds}))
    gateway.send(host_order("a", spoken))
    runs = [gateway.start("a", PROMPT, greedy(40), guide=guide), gateway.start("a", PROMPT, greedy(40))]

    stuck, free = gateway.until_ended(*runs)

    assert stuck.failed is not None
    assert stuck.failed.label == "guide_stuck"
    assert f"beyond token {len(stuck.tokens)} of the output" in stuck.failed.reason
    assert len(free.tokens) == 40


def test_a_request_that_panics_while_it_is_checked_gets_its_answer() -> None:
    class Panic(BaseException):
        """An error like those of packages in Rust, which are no Exceptions."""

    class PanickingIntake:
        def request(self, *_: object, **__: object) -> None:
            raise Panic("index out of bounds")

    order = StartRequest(1, ModelId("a"), PROMPT, (), greedy(1), GuideSpec("lark", "start: /a/"))

    outcome = _checked(PanickingIntake(), order)  # type: ignore[arg-type] # it plays one

    assert isinstance(outcome, EngineFailed)


def test_a_cancelled_request_says_no_more_and_leaves_its_memory(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    is_over = True
    while is_over:  # before it was cancelled, where the machine is busy
        run = gateway.start("a", PROMPT, greedy(50))
        gateway.until(lambda fact, run=run: isinstance(fact, StepDone) and run in fact.runs)
        gateway.send(CancelRequest(run), Ping(-1))
        gateway.until(lambda fact: isinstance(fact, Pong) and fact.number == -1)
        is_over = gateway.runs[run].finish_reason is not None
    num_tokens = len(gateway.runs[run].tokens)
    (use,) = gateway.ping().models

    assert (use.num_running, use.num_waiting, use.kv_used_blocks) == (0, 0, 0)
    assert len(gateway.runs[run].tokens) == num_tokens < 50
    assert gateway.runs[run].finish_reason is None


def test_wrong_requests_are_refused_and_disturb_nobody(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    runs = [
        gateway.start("a", (9999,), greedy(4)),
        gateway.start("a", PROMPT * 20, greedy(4)),
        gateway.start("nobody", PROMPT, greedy(4)),
        gateway.start("a", PROMPT, greedy(4)),
    ]
    ended = gateway.until_ended(*runs)

    labels = [run.failed.label if run.failed else None for run in ended]
    assert labels == ["bad_prompt", "prompt_too_long", "service", None]
    assert len(ended[-1].tokens) == 4


def test_a_model_that_is_dropped_while_it_is_loaded_leaves_nothing(gateway: Gateway, model: Path) -> None:
    for _ in range(3):
        gateway.send(host_order("a", model))
        run = gateway.start("a", PROMPT, greedy(40))
        gateway.drop("a")
        assert is_empty(gateway)
        assert len(gateway.runs[run].tokens) < 40, "a fast load leaves time for some, but not for all"

    assert isinstance(gateway.host("a", model), ModelLoaded)


def test_a_ping_tells_what_is_used(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    pong = gateway.ping()

    (use,) = pong.models
    assert (use.model, use.hold, use.is_hosted, use.num_running) == ("a", Hold.WARM, True, 0)
    assert use.weights_bytes == use.total_bytes == read_manifest(model).num_bytes
    assert pong.workspace_bytes > 0
    assert use.tables_bytes > 0
    parts = use.weights_bytes + use.kv_bytes + use.tables_bytes + pong.workspace_bytes + pong.lost_bytes
    assert pong.free_bytes + parts == pong.budget_bytes == BUDGET_BYTES


def test_a_model_beyond_the_budget_is_refused_with_the_numbers(keeper: Keeper, model: Path) -> None:
    """Which the gateway would never order. Not in a process, which would need seconds to start."""
    budget_bytes = read_manifest(model).num_bytes
    new_pool = partial(ArenaPool, torch.device("cpu"), budget_bytes)
    with working_beside(Path(keeper.socket), new_pool, config=CONFIG) as gateway:
        gateway.host("b", model)
        failed = gateway.until(HostingFailed)

    assert failed.label == "device"
    assert f"`b` needs {budget_bytes} bytes for weights, " in failed.reason
    assert f"more than can be freed of {budget_bytes}" in failed.reason


def test_a_model_that_was_changed_since_it_was_deployed_is_refused(gateway: Gateway, model: Path) -> None:
    failed = gateway.host("a", model, digest="0" * 32)

    assert isinstance(failed, HostingFailed)
    assert "`a` was changed since it was deployed (manifest " in failed.reason
    assert f"deployed {'0' * 32}); deploy it again" in failed.reason


def test_a_chunk_that_rotted_fails_its_model_alone(gateway: Gateway, model: Path, tmp_path: Path) -> None:
    rotten = tmp_path / "rotten"
    shutil.copytree(converted("qwen3"), rotten)
    flip(rotten / WEIGHTS, read_manifest(rotten).num_bytes - 5000)
    gateway.host("a", model)
    gateway.send(host_order("rotten", rotten))
    run = gateway.start("rotten", PROMPT, greedy(4))
    failed = gateway.until_kind(HostingFailed)
    (other,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(4)))

    assert failed.model == "rotten"
    assert failed.label in ("chunk_corrupt", "chunk_missing")
    assert gateway.runs[run].tokens == []
    assert len(other.tokens) == 4


def test_a_model_that_is_not_there_fails(gateway: Gateway, model: Path, tmp_path: Path) -> None:
    gateway.send(msgspec.structs.replace(host_order("a", model), where=str(tmp_path / "nowhere")))
    failed = gateway.until_kind(HostingFailed)

    assert (failed.model, failed.label) == ("a", "bad_checkpoint")


def test_a_gateway_that_reads_late_misses_nothing(gateway: Gateway, model: Path) -> None:
    gateway.host("a", model)
    sampling = greedy(50, logprobs=20)  # many bytes for each token
    runs = [gateway.start("a", PROMPT, sampling) for _ in range(80)]

    ended = gateway.until_ended(*runs)

    wanted = ended[0].tokens
    assert all(run.tokens == wanted for run in ended)
    assert len(wanted) == 50


def test_progress_is_told_and_never_goes_back(gateway: Gateway, model: Path) -> None:
    gateway.facts.clear()
    gateway.host("a", model)
    told = [fact for fact in gateway.facts if isinstance(fact, LoadProgress)]

    assert [fact.num_bytes for fact in told] == sorted(fact.num_bytes for fact in told)
    assert len(told) <= 100


def test_a_load_waits_for_a_keeper_that_is_started_anew(model: Path) -> None:
    with folder() as place:
        setup = keeper_setup(place)
        with keeping(setup) as keeper, working(setup.socket) as rig:
            gateway = rig.gateway
            gateway.host("a", model)
            keeper.kill()
            keeper.wait()
            gateway.send(host_order("b", converted("opt-pre")))
            waiting = gateway.start("b", PROMPT, greedy(8))
            (run,) = gateway.until_ended(gateway.start("a", PROMPT, greedy(4)))
            with keeping(setup):
                (other,) = gateway.until_ended(waiting)
            gateway.send(Shutdown())
            code = rig.worker.wait()

    assert len(run.tokens) == 4
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert other.tokens == answer(converted("opt-pre"), PROMPT, params)
    assert code == 0


def test_without_a_keeper_a_load_fails_in_the_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "KEEPER_WAIT_S", 0.0)
    news: SimpleQueue[HostingNews] = SimpleQueue()
    with folder() as place, keeping(keeper_setup(place)) as keeper:
        lease_client = LeaseClient(Path(keeper_setup(place).socket), is_pinned=False)
        keeper.kill()
        keeper.wait()
        device = torch.device("cpu")
        resources = HostingResources(
            device, CONFIG, lambda terms: ArenaPool(device, 1 << 30, terms), lease_client, Loader(device)
        )
        pool = resources.new_pool(lambda model: EvictionTerms(Hold.BUSY, 0.0, is_loading=False))
        hosted = HostedModel(host_order("a", model), resources, pool, lambda hosting, told: news.put(told))
        hosted.find()
        failed = news.get(timeout=60)
        lease_client.close()

    assert isinstance(failed, ModelBroken)
    assert failed.failure.label == "lender_gone"


def test_a_worker_whose_gateway_is_gone_ends(rig: Rig) -> None:
    """The last test of the module: it ends the shared worker."""
    rig.gateway.close()

    assert rig.worker.wait() == 0
