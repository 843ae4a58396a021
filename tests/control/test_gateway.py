"""The gateway takes and refuses requests, with everything real but the processes."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.deploy.preset import Preset
from hearth.control.deploy.registry import Registry
from hearth.control.gateway import Gateway
from hearth.control.observe.exchange_record import ExchangeRecord, set_current_exchange
from hearth.control.observe.timeline import Timeline
from hearth.control.requests.caller import ANYBODY, Caller, GroupId, KeyId, KeyTerms
from hearth.control.requests.correlation import Correlation
from hearth.control.requests.fact_decoder import DecodedFact, DecodedLate, DecodedTexts, DecodedToken
from hearth.control.requests.generation import GenerationRequest, TokenDelta
from hearth.control.requests.request_checks import MIN_TEXT_CHARS
from hearth.core.errors import (
    BadPrompt,
    BadSampling,
    EngineFailed,
    Forbidden,
    NoWorkers,
    PromptTooLong,
    ServiceError,
    ShuttingDown,
    UnknownModel,
    WorkersLost,
)
from hearth.core.messages import CancelRequest, HostModel, StartRequest, StepDone
from hearth.core.types import (
    FinishReason,
    ModelId,
    Pace,
    Pooling,
    PromptReading,
    RequestId,
    SamplingParams,
    WorkerId,
)
from hearth.node.processes import WorkerEnding
from hearth.policy.fleet.events import Option
from hearth.policy.limits.key_limiter import KeyLimits
from tests.control.deploy.test_registry import ADAPTER
from tests.control.gateway_rig import CONTEXT, WORKER, GatewayRig, RecordingLink, ask, emit, with_rig
from tests.control.shown_metrics import shown_value

USER = Caller("somebody", "user", GroupId("somebody"))


def test_a_prompt_is_encoded_and_checked(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        async def encode(name: str, prompt: str | list[int]) -> list[int]:
            return await rig.gateway.prompts.encode(name, prompt, ANYBODY)

        assert await encode("tiny", [1, 2, 3]) == [1, 2, 3]
        assert len(await encode("tiny", "!!!")) == 3
        assert await encode("tiny", "!" * (CONTEXT - 1))
        with pytest.raises(PromptTooLong, match="prompt has 32 tokens, limit for `tiny`: 31"):
            await encode("tiny", "!" * CONTEXT)
        with pytest.raises(
            PromptTooLong, match=r"prompt has 65537 characters, .* at most 65536 are tokenised"
        ):
            await encode("tiny", "!" * (MIN_TEXT_CHARS + 1))
        with pytest.raises(PromptTooLong, match="prompt has 100000 tokens"):
            await encode("tiny", [1] * 100_000)
        with pytest.raises(BadPrompt, match="prompt has 0 tokens"):
            await encode("tiny", [])
        with pytest.raises(UnknownModel):
            await encode("nobody", "!")

    with_rig(data_dir, scene)


def during_encoding(rig: GatewayRig, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have something happen as soon as a prompt has been encoded."""
    encode = rig.encoder.encode

    async def encoded(*arguments: object) -> tuple[int, ...]:
        tokens = await encode(*arguments)  # type: ignore[arg-type] # passed on
        happens()
        return tokens

    monkeypatch.setattr(rig.encoder, "encode", encoded)


def test_what_happens_while_a_prompt_is_encoded_is_noticed(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(rig: GatewayRig) -> None:
        with Registry(data_dir) as other:
            with monkeypatch.context() as patch:
                during_encoding(rig, lambda: other.replace(replace(deployed, digest="1" * 32)), patch)
                with pytest.raises(ServiceError, match="`tiny` was replaced while the request was prepared"):
                    await rig.submit(ask(), ANYBODY)
            other.replace(deployed)
            with monkeypatch.context() as patch:
                during_encoding(rig, lambda: other.remove("tiny") and None, patch)
                with pytest.raises(UnknownModel):
                    await rig.submit(ask(), ANYBODY)
            other.add(deployed)
        with monkeypatch.context() as patch:
            during_encoding(rig, rig.gateway.end_all, patch)
            with pytest.raises(ShuttingDown):
                await rig.submit(ask(), ANYBODY)
        assert rig.driver.requests.by_id == {}

    with_rig(data_dir, scene)


def test_an_adapter_that_is_replaced_while_a_prompt_is_encoded_answers_as_it_is_now(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of an adapter are those of its base, so nobody has to ask again."""
    facts = replace(ADAPTER.facts, dimensions=deployed.facts.dimensions, dtype="float32")
    first = replace(ADAPTER, facts=facts)
    second = replace(first, digest="2" * 64)

    async def scene(rig: GatewayRig) -> None:
        with Registry(data_dir) as other:
            other.add(first)
            during_encoding(rig, lambda: other.replace(second), monkeypatch)
            await rig.submit(replace(ask(), model="shop"), ANYBODY)
        (active,) = rig.driver.requests.by_id.values()
        assert active.adapter is not None
        assert active.adapter.adapter == second.adapter_id

    with_rig(data_dir, scene)


def test_while_no_worker_comes_up_requests_end_with_the_reason_and_health_has_it(
    data_dir: DataDir, deployed: Deployed
) -> None:
    reason = "worker 0 ended 3 times before it was ready: it has no memory; next try in "

    async def scene(rig: GatewayRig) -> None:
        waiting, (seat,) = await rig.submit(ask(), ANYBODY), rig.supervisor.seats
        assert rig.gateway.views.health().status == "starting"
        for num_before in range(3):
            assert (rig.gateway.views.health().status, seat.num_failed_starts) == ("starting", num_before)
            pause = asyncio.create_task(seat._back_off(WorkerEnding("it has no memory"), 60.0))
            await asyncio.sleep(0)
            pause.cancel()

        with pytest.raises(NoWorkers, match=f"no worker is up: {reason}"):
            await waiting.next()
        with pytest.raises(NoWorkers, match=f"no worker is up: {reason}") as refused:
            await rig.submit(ask(), ANYBODY)
        assert refused.value.retry_s == pytest.approx(60.0, abs=30.0)
        assert (refused.value.http_status, refused.value.label) == (503, "no_workers")
        health, (worker,) = rig.gateway.views.health(), rig.gateway.views.ps().workers
        assert (health.status, worker.state) == ("failing", "failing")
        for told in (health.reason, worker.reason):
            assert told is not None
            assert told.startswith(reason)

    with_rig(data_dir, scene)


def test_a_text_that_breaks_fails_its_request_and_frees_the_worker(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        broken, other = await rig.submit(ask(), ANYBODY), await rig.submit(ask(), ANYBODY)
        starts = [order for order in link.orders if isinstance(order, StartRequest)]
        assert len(starts) == 2
        request = rig.driver.requests.by_id[broken.request_id]
        step = StepDone(request.model, [start.run for start in starts], [5, 5])
        rig.driver.receive(DecodedFact(link, 0, step, DecodedTexts(broken=[request])))  # type: ignore[arg-type] # as much of a link as is needed
        with pytest.raises(EngineFailed, match=r"the text of request .* cannot be made of its tokens"):
            await broken.next()
        assert link.orders[-1] == CancelRequest(starts[0].run)
        assert set(rig.driver.requests.by_id) == {other.request_id}
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_text_that_comes_behind_its_step_ends_its_request_and_is_counted(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        request = rig.driver.requests.by_id[stream.request_id]
        (run,) = rig.driver.requests.by_run
        rig.receive(link, StepDone(request.model, [run], [5], {run: FinishReason.LENGTH}))
        assert rig.driver.requests.by_id, "its text is still to come"
        request.emitted.append(5)
        token = DecodedToken(request, TokenDelta("a", 5, None, FinishReason.LENGTH, 0), is_run_over=True)
        late = DecodedLate(link, DecodedTexts([token]))  # type: ignore[arg-type] # as much of a link as is needed
        rig.driver.receive(late)
        rig.driver.book_finished()
        assert (await stream.next())[0].text == "a"
        assert not rig.driver.requests.by_id
        assert shown_value(rig.metrics, "hearth_late_text_tokens_total") == 1
        assert shown_value(rig.metrics, 'hearth_output_tokens_total{model="tiny"}') == 1
        rig.driver.receive(late)
        assert [type(order) for order in link.orders] == [HostModel, StartRequest], "it had ended there"

    with_rig(data_dir, scene)


def test_a_request_is_on_its_way_in_the_turn_in_which_it_is_taken(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await rig.submit(ask(), ANYBODY)
        assert [type(order) for order in link.orders] == [HostModel, StartRequest]
        await rig.submit(ask(), ANYBODY)
        assert [type(order) for order in link.orders] == [HostModel, StartRequest, StartRequest]
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_request_whose_worker_is_lost_goes_on_with_all_that_was_said(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        first = rig.join()
        stream = await rig.submit(ask(), ANYBODY)
        emit(rig, first, 5, 6)
        rig.receive(first, None)
        second = rig.join()
        (before, after) = (
            next(order for order in link.orders if isinstance(order, StartRequest))
            for link in (first, second)
        )
        assert (before.output, after.output) == ((), (5, 6))
        assert (before.prompt, before.sampling) == (after.prompt, after.sampling)
        assert before.salt == after.salt
        assert before.run != after.run
        emit(rig, second, 7, finished=True)
        assert [piece.token for piece in await stream.next()] == [5, 6, 7]
        explained = rig.gateway.views.explain(stream.request_id, ANYBODY)
        assert explained is not None
        assert (explained.outcome, explained.num_resumes, explained.num_output_tokens) == ("stop", 1, 3)

    with_rig(data_dir, scene)


def embedded(rig: GatewayRig, link: RecordingLink, reading: PromptReading) -> None:
    """The prompts of all runs are computed, as the text thread tells it of those of no tokens."""
    requests = dict(rig.driver.requests.by_run)
    done = StepDone(
        ModelId("tiny"),
        list(requests),
        [5] * len(requests),
        dict.fromkeys(requests, FinishReason.LENGTH),
        readings=dict.fromkeys(requests, reading),
    )
    texts = DecodedTexts(ended=list(requests.values()))
    rig.driver.receive(DecodedFact(link, 0, done, texts))  # type: ignore[arg-type] # as much of a link as is needed
    rig.driver.book_finished()


def test_an_embedding_is_a_request_of_no_tokens_and_ends_once_whoever_computes_it(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        wanted = replace(ask(), sampling=SamplingParams(max_tokens=0), pooling=Pooling.MEAN)
        first, caller = rig.join(), terms(limits=KeyLimits(tokens_per_min=100))
        with rig.gateway.admissions.admit(caller) as admission:
            stream = rig.gateway.start(await rig.gateway.prepare(wanted, admission))
            rig.receive(first, None)
            second = rig.join()
            orders = [
                order for link in (first, second) for order in link.orders if isinstance(order, StartRequest)
            ]
            assert [(one.pooling, one.sampling.max_tokens, one.output) for one in orders] == [
                (Pooling.MEAN, 0, ())
            ] * 2
            reading = PromptReading(embedding=bytes(8))
            embedded(rig, second, reading)
            assert (await stream.rest(), stream.reading) == ([], reading)
            assert (stream.finish_reason, stream.num_output_tokens) == (FinishReason.STOP, 0)
            embedded(rig, second, reading)  # of a run that has ended
            stream.close()
        assert not any(isinstance(order, CancelRequest) for order in second.orders)
        explained = rig.gateway.views.explain(stream.request_id, caller)
        assert explained is not None
        assert (explained.outcome, explained.num_output_tokens, explained.num_resumes) == ("stop", 0, 1)
        assert explained.marks[0].detail == "for an embedding, pooling: mean"
        status = rig.gateway.admissions.status(caller)
        assert status is not None
        assert status.tokens is not None
        assert status.tokens.remaining == 98
        assert shown_value(rig.metrics, 'hearth_requests_total{model="tiny",outcome="stop"}') == 1
        assert shown_value(rig.metrics, 'hearth_output_tokens_total{model="tiny"}') == 0
        assert not rig.driver.requests.by_id

    with_rig(data_dir, scene)


@pytest.mark.parametrize(
    "look",
    [
        lambda gateway: gateway.prompts.tokenize("tiny", "!!", ANYBODY, None),
        lambda gateway: gateway.prompts.detokenize("tiny", [5], ANYBODY),
        lambda gateway: gateway.prompts.tokenizer("tiny", ANYBODY),
        lambda gateway: gateway.prompts.encode("tiny", "!!", ANYBODY),
    ],
)
def test_the_model_of_every_exchange_is_noted(
    data_dir: DataDir, deployed: Deployed, look: Callable[[Gateway], Awaitable[object]]
) -> None:
    async def scene(rig: GatewayRig) -> None:
        record = ExchangeRecord()
        set_current_exchange(record)
        await look(rig.gateway)
        assert record.model == "tiny"

    with_rig(data_dir, scene)


def test_a_prompt_stands_behind_the_tokens_that_it_follows(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        alone = await rig.submit(ask("!!"), ANYBODY)
        behind = await rig.submit(replace(ask("!!"), follows=(7, 8)), ANYBODY)
        assert tuple(behind.prompt) == (7, 8, *alone.prompt)
        with pytest.raises(PromptTooLong):
            await rig.submit(replace(ask("!!"), follows=(7,) * (CONTEXT - 1)), ANYBODY)
        with pytest.raises(BadPrompt, match="prompt holds token"):
            await rig.submit(replace(ask("!!"), follows=(1 << 30,)), ANYBODY)
        assert link.orders
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_prompt_that_nothing_follows_may_fill_the_context(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        alone = replace(ask([5] * CONTEXT), sampling=SamplingParams(max_tokens=0))
        await rig.submit(alone, ANYBODY)
        with pytest.raises(PromptTooLong, match=f"33 tokens, limit for `tiny`: {CONTEXT} "):
            await rig.submit(replace(alone, prompt=[5] * (CONTEXT + 1)), ANYBODY)
        with pytest.raises(PromptTooLong, match=f"32 tokens, limit for `tiny`: {CONTEXT - 1} "):
            await rig.submit(replace(alone, sampling=SamplingParams()), ANYBODY)
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_more_prompt_logprobs_than_one_answer_should_have_are_refused(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(rig: GatewayRig) -> None:
        monkeypatch.setattr("hearth.control.requests.request_checks.MAX_PROMPT_LOGPROBS", 20)
        scored = replace(ask([5] * 6), sampling=SamplingParams(prompt_logprobs=3))
        with pytest.raises(BadPrompt, match="6 tokens has 24 logprobs with 3 of the most likely"):
            await rig.submit(scored, ANYBODY)

    with_rig(data_dir, scene)


def test_tokens_of_a_text_are_told_however_many_and_only_those_of_the_model_have_a_text(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        gateway = rig.gateway
        tokens = await gateway.prompts.tokenize("tiny", "!!" * CONTEXT, ANYBODY, add_special_tokens=None)
        assert len(tokens) > CONTEXT
        assert await gateway.prompts.detokenize("tiny", tokens, ANYBODY) == " ".join("!" * 2 * CONTEXT)
        with pytest.raises(BadPrompt, match="prompt holds token 1000000"):
            await gateway.prompts.detokenize("tiny", [1_000_000], ANYBODY)
        with pytest.raises(PromptTooLong, match="characters"):
            await gateway.prompts.tokenize(
                "tiny", "!" * (MIN_TEXT_CHARS + 1), ANYBODY, add_special_tokens=None
            )

    with_rig(data_dir, scene)


def test_the_step_that_a_lost_worker_was_in_is_told_to_the_brain(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        stream = await rig.submit(ask(), ANYBODY)
        for _ in range(5):
            link = rig.join()
            link.beacon.show(ModelId("another"), longest_s=0.1)
            rig.receive(link, None)
        assert stream.request_id in rig.driver.requests.by_id, "none of the losses was its own"
        for _ in range(3):
            link = rig.join()
            link.beacon.show(ModelId("tiny"), longest_s=0.1)
            emit(rig, link, 5)
            rig.receive(link, None)
        assert [piece.token for piece in await stream.next()] == [5, 5, 5], (
            "a model that makes tokens goes on"
        )
        link = rig.join()
        link.beacon.show(ModelId("tiny"), longest_s=0.1)
        rig.receive(link, None)
        with pytest.raises(WorkersLost, match="worker `w0` died under it; that was the loss number 4"):
            await stream.next()

    with_rig(data_dir, scene)


def test_a_loss_counts_only_against_requests_of_the_step_that_the_worker_died_in(
    data_dir: DataDir, deployed: Deployed
) -> None:
    """The second is on the same worker, of the same model, and waits there."""

    async def scene(rig: GatewayRig) -> None:
        deadly, waiting = [await rig.submit(ask(), ANYBODY) for _ in range(2)]
        for _ in range(4):
            link = rig.join()
            run = rig.driver.requests.by_id[deadly.request_id].run
            link.beacon.show(ModelId("tiny"), 0.1, [str(run), "999999"])
            rig.driver._answered.add((WORKER, ModelId("tiny")))  # as once others had tokens of it there
            rig.receive(link, None)
        with pytest.raises(WorkersLost, match="that was the loss number 4"):
            await deadly.next()
        link = rig.join()
        emit(rig, link, 5, finished=True)
        assert [piece.token for piece in await waiting.next()] == [5]
        explained = rig.gateway.views.explain(waiting.request_id, ANYBODY)
        assert explained is not None
        assert explained.outcome == "stop"
        assert "in a step of its model without it, not counted against it" in str(explained)

    with_rig(data_dir, scene)


ADA, AMY = (Caller(name, "user", GroupId("a")) for name in ("ada", "amy"))
BOB = Caller("bob", "user", GroupId("b"))


def salts(link: RecordingLink) -> list[bytes]:
    return [order.salt for order in link.orders if isinstance(order, StartRequest)]


def test_requests_of_one_group_have_its_salt_and_those_of_another_have_another(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        for caller in (ADA, BOB, AMY, ADA):
            await rig.submit(ask(), caller)
        ada, bob, amy, again = salts(link)
        assert ada == amy == again
        assert ada != bob
        assert len(ada) == len(bob) == 32
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_routing_finds_the_prompts_of_ones_own_group_alone(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.policy.fleet.prefixes.LENGTHS", (4, 8, 16))

    async def scene(rig: GatewayRig) -> None:
        rig.join()
        rig.join(worker=WorkerId("w1"))

        async def count_cached(caller: Caller, prompt: list[int]) -> int:
            stream = await rig.submit(ask(prompt), caller)
            explained = rig.gateway.views.explain(stream.request_id, caller)
            assert explained is not None
            return sum(option.cached_tokens for option in explained.options)

        prompt = list(range(10, 30))
        assert await count_cached(ADA, prompt) == 0
        assert await count_cached(BOB, prompt) == 0, "of another group"
        assert await count_cached(AMY, prompt) == 16, "of the same group"
        assert await count_cached(ADA, [*prompt[:9], 5, 5]) == 8
        assert shown_value(rig.metrics, "hearth_routed_prefix_tokens_total") == 24
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_prompts_are_not_digested_for_one_worker(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.policy.fleet.prefixes.LENGTHS", (1,))

    async def scene(rig: GatewayRig) -> None:
        for num_digests, name in enumerate(("w0", "w1")):
            rig.join(worker=WorkerId(name))
            stream = await rig.submit(ask([5] * 8), ANYBODY)
            assert len(rig.driver.fleet.queues.requests[stream.request_id].prefixes) == num_digests
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_an_answer_is_the_text_behind_its_prompt_whoever_goes_on_with_it(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        first = rig.join()
        stream = await rig.submit(ask("!!"), ANYBODY)
        emit(rig, first, 5)
        rig.receive(first, None)
        emit(rig, rig.join(), 6, 7, finished=True)
        prompt = await rig.gateway.prompts.encode("tiny", "!!", ANYBODY)
        answer = "".join(piece.text for piece in await stream.next())
        # A tokenizer without a decoder has a space between all tokens, so also before those of the answer.
        assert "! !" + answer == stream.tokenizer.decode([*prompt, 5, 6])  # the last one ends it unseen
        assert answer.startswith(" ")

    with_rig(data_dir, scene)


def test_a_salt_is_guessed_from_no_name_and_written_nowhere(
    data_dir: DataDir, deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[bytes] = []

    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        stream = await rig.submit(ask(), ADA)
        (salt,) = salts(link)
        assert repr(salt) not in repr(rig.driver.requests.by_id[stream.request_id])
        rig.gateway.end_all()
        found.append(salt)

    caplog.set_level("DEBUG")
    for _ in range(2):  # two services, or one that is started again
        with_rig(data_dir, scene)
    assert found[0] != found[1]
    spelled = [
        text.encode() for salt in found for text in (salt.hex(), repr(salt), base64.b64encode(salt).decode())
    ]
    kept = [path.read_bytes() for path in data_dir.path.rglob("*") if path.is_file()] + [caplog.text.encode()]
    assert len(kept) > 2
    assert not [text for text in (*found, *spelled) for content in kept if text in content]


def test_a_request_is_explained_to_its_own_group_and_to_monitors(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        stream = await rig.submit(ask(), ADA)
        monitor = Caller("eve", "monitor", GroupId("m"))
        told = [rig.gateway.views.explain(stream.request_id, caller) for caller in (ADA, AMY, monitor, BOB)]
        assert [one is not None for one in told] == [True, True, True, False]
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_key_of_a_preset_alone_sees_its_requests_which_its_base_answers(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        await rig.gateway.put_preset("pirate", "tiny", Preset(system="Arr."))
        only = replace(ADA, terms=KeyTerms(models=("pirate",)))
        stream = await rig.submit(replace(ask(), model="pirate"), only)
        assert stream.model == "pirate"
        assert [one.model for one in link.orders if isinstance(one, HostModel)] == ["tiny"]
        whole, own = (rig.gateway.views.explain(stream.request_id, caller) for caller in (ADA, only))
        assert whole is not None
        assert [one.detail for one in whole.marks if one.detail]
        assert own is not None
        assert not [one for one in (*own.spans, *own.marks) if one.detail]
        other = replace(ADA, terms=KeyTerms(models=("other",)))
        assert rig.gateway.views.explain(stream.request_id, other) is None
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_request_is_explained_by_what_its_client_calls_it(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        streams = [await rig.submit(ask(), caller, Correlation("mine")) for caller in (ADA, BOB)]
        told = [rig.gateway.views.explain("mine", caller) for caller in (ADA, BOB)]
        assert [one and one.request_id for one in told] == [stream.request_id for stream in streams]
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_ignored_fields_are_counted_by_label(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.gateway.count_ignored_fields(["store", "other", "other"])
        name, metrics = "hearth_ignored_fields_total", rig.metrics.registry
        assert metrics.get_sample_value(name, {"field": "other"}) == 2
        assert metrics.get_sample_value(name, {"field": "store"}) == 1

    with_rig(data_dir, scene)


def test_a_stop_string_ends_the_answer_and_never_reaches_the_worker(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        tokenizer = await rig.gateway.prompts.tokenizer("tiny", ANYBODY)
        (token, *_) = tokenizer.encode("!", add_special_tokens=False)
        stream = await rig.submit(GenerationRequest("tiny", "!!", SamplingParams(stop=["!"])), ANYBODY)
        assert [order.sampling.stop for order in link.orders if isinstance(order, StartRequest)] == [()]
        emit(rig, link, token)
        assert [piece.finish_reason for piece in await stream.next()] == [FinishReason.STOP]
        assert isinstance(link.orders[-1], CancelRequest)
        assert not rig.driver.requests.by_id

    with_rig(data_dir, scene)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"tokens_per_s": 21.0}, "`pace` must be at most 20 for `tiny`, given: 21; more would be taken from"),
        ({"first_token_s": 0.4}, "`first_token_target` must be at least 0.5 for `tiny`, given: 0.4"),
    ],
)
def test_only_an_admin_may_be_due_sooner_than_is_usual_for_the_model(
    data_dir: DataDir, deployed: Deployed, wanted: dict[str, float], message: str
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        with pytest.raises(Forbidden, match=re.escape(message)):
            await rig.submit(replace(ask(), **wanted), USER)
        assert rig.driver.requests.by_id == {}
        await rig.submit(replace(ask(), **wanted), ANYBODY)
        later = await rig.submit(replace(ask(), tokens_per_s=0.0, first_token_s=60.0), USER)
        assert rig.driver.requests.by_id[later.request_id].pace == Pace(60.0, 0.0, 1.5)
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def terms(**changes: object) -> Caller:
    """Somebody whose key has other terms."""
    return replace(USER, terms=KeyTerms(**changes), key_id=KeyId("somebody"))  # type: ignore[arg-type] # its fields


def test_a_model_that_a_key_may_not_use_is_as_unknown_as_one_that_is_not_there(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.join()
        others, own = terms(models=("another", "tiny-2")), terms(models=("tiny",))
        told = []
        for name in ("tiny", "tinz"):
            with pytest.raises(UnknownModel) as refused:
                await rig.submit(replace(ask(), model=name), others)
            told.append(str(refused.value).replace(name, "NAME"))
            with pytest.raises(UnknownModel, match=name):
                rig.gateway.deployments.model(name, others)
            with pytest.raises(UnknownModel):
                await rig.gateway.prompts.encode(name, "!", others)
            with pytest.raises(UnknownModel):
                await rig.gateway.prompts.tokenizer(name, others)
            with pytest.raises(UnknownModel):
                await rig.gateway.deployments.show(name, others, look=False)
        none = "nothing is deployed yet; deploy a directory, GGUF file or hf:ORG/NAME by `hearth deploy`"
        assert told == [f"no model named `NAME`; {none}"] * 2
        assert rig.gateway.deployments.models(others) == []
        assert [view.name for view in rig.gateway.deployments.models(own)] == ["tiny"]
        await rig.submit(ask(), own)
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_a_key_with_models_is_told_of_no_others(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(rig: GatewayRig) -> None:
        rig.registry.add(replace(deployed, name="secret"))
        for model in ("tiny", "secret"):
            timeline = Timeline(RequestId(f"of-{model}"), model, 0.0, 0.0, 1, USER.group)
            costs = (0.0, 0.0, 0.0, 0.0)
            options = (Option(WORKER, *costs), Option(WorkerId("w1"), *costs, "makes room for `secret`"))
            timeline.placed(0.0, WORKER, "free_room", options, None)
            rig.observer.begin(timeline)
        own, monitor = terms(models=("tiny",)), replace(terms(models=("tiny",)), role="monitor")
        whole, cut = (rig.gateway.views.explain("of-tiny", caller) for caller in (USER, own))
        assert whole is not None
        bare = [tuple(replace(one, detail="") for one in each) for each in (whole.spans, whole.marks)]
        assert cut == replace(whole, options=whole.options[:1], spans=bare[0], marks=bare[1])
        assert rig.gateway.views.explain("of-tiny", monitor) == whole
        told = [rig.gateway.views.explain("of-secret", caller) is not None for caller in (USER, own, monitor)]
        assert told == [True, False, True]
        assert rig.gateway.views.explain("last", own) == cut
        with Registry(data_dir) as other:
            during_encoding(rig, lambda: other.remove("tiny") and None, monkeypatch)
            with pytest.raises(UnknownModel, match="`tiny`; nothing is deployed yet"):
                await rig.submit(ask(), own)
        assert rig.gateway.views.explain("of-tiny", own) == cut

    with_rig(data_dir, scene)


def test_batch_requests_have_no_pace_whether_they_or_their_key_say_so(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        nightly = terms(service_class="batch")
        for wanted, caller in (
            (replace(ask(), is_batch=True), USER),
            (ask(), nightly),
            (replace(ask(), tokens_per_s=0.0), USER),
        ):
            stream = await rig.submit(wanted, caller)
            assert rig.driver.requests.by_id[stream.request_id].pace == Pace(0.5, 0.0, 1.5)
            assert rig.driver.fleet.queues.requests[stream.request_id].is_batch
            assert stream.is_batch
        assert all(order.pace.is_batch for order in link.orders if isinstance(order, StartRequest))
        for wanted, caller in (
            (replace(ask(), is_batch=True, tokens_per_s=5.0), USER),
            (replace(ask(), tokens_per_s=5.0), nightly),
        ):
            with pytest.raises(BadSampling, match="`pace` must be 0 for batch requests, given: 5; leave it"):
                await rig.submit(wanted, caller)
        rig.gateway.end_all()

    with_rig(data_dir, scene)


def test_what_a_request_used_is_settled_and_counted_however_it_ends(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(rig: GatewayRig) -> None:
        link = rig.join()
        caller = terms(limits=KeyLimits(tokens_per_min=100, concurrent=1))
        for is_finished in (True, False):
            with rig.gateway.admissions.admit(caller) as admission:
                stream = rig.gateway.start(await rig.gateway.prepare(ask("!!"), admission))
                charged = rig.gateway.admissions.status(caller)
                emit(rig, link, 5, 6, 7, finished=is_finished)
                stream.close()
        assert charged is not None
        assert charged.tokens is not None
        assert charged.tokens.remaining == 100 - (2 + 3) - (2 + 16)
        settled = rig.gateway.admissions.status(caller)
        assert settled is not None
        assert settled.tokens is not None
        assert settled.tokens.remaining == 100 - 2 * (2 + 3)
        value = rig.metrics.registry.get_sample_value
        assert value("hearth_key_requests_total", {"key": "somebody"}) == 2
        assert value("hearth_key_prompt_tokens_total", {"key": "somebody"}) == 4
        assert value("hearth_key_output_tokens_total", {"key": "somebody"}) == 6

    with_rig(data_dir, scene)
