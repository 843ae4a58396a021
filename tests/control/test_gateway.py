"""What the gateway takes and refuses, with everything real but the processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.config import HearthConfig, ModelConfig
from hearth.control.ask import Ask, Chat, Piece
from hearth.control.catalog import Catalog
from hearth.control.datadir import DataDir
from hearth.control.deploy import DeployOrder
from hearth.control.deployer import carry_out
from hearth.control.driver import Driver
from hearth.control.gateway import MIN_TEXT_CHARS, Gateway
from hearth.control.hearing import Heard, Said
from hearth.control.journal import Journal
from hearth.control.metrics import Metrics
from hearth.control.registry import Deployed, Registry
from hearth.control.stock import Stock
from hearth.control.supervisor import Supervisor, Vigilance
from hearth.control.texts import Texts
from hearth.errors import BadPrompt, EngineFailed, PromptTooLong, ServiceError, ShuttingDown, UnknownModel
from hearth.messages import CancelRequest, Hello, HostModel, KeeperSetup, Order, StartRequest, StepDone
from hearth.policy.events import BrainConfig
from hearth.policy.fleet import Fleet
from hearth.store.keeper_client import KeeperClient
from hearth.types import FinishReason, ModelId, SamplingParams, WorkerId

CONTEXT = 32
WORKER = WorkerId("w0")


class Wire:
    """A worker's link that keeps what is sent."""

    worker = WORKER

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def consumed(self, num_bytes: int) -> None:
        pass


class Office:
    """A gateway that offers `tiny`, and its parts."""

    def __init__(self, data_dir: DataDir) -> None:
        config, brain = HearthConfig(), BrainConfig()
        self.registry = Registry.open(data_dir)
        self.journal = Journal(data_dir.journal_path(), brain, 1 << 30)
        self.texts = Texts(2.0)
        configs = {"tiny": ModelConfig(context=CONTEXT)}
        catalog = Catalog(self.registry, configs, config.engine, config.service.keep_alive)
        metrics = Metrics()
        self.driver = Driver(Fleet(brain), self.journal, metrics, catalog.host_order, 4)
        nobody = KeeperSetup("", "cpu", "", None, 1 << 24, "info")
        supervisor = Supervisor(lambda *_: NotImplemented, nobody, 0, Vigilance(1.0, 1.0, 1), None)
        stock = Stock(self.registry, catalog, self.driver, KeeperClient(Path("/nowhere")), data_dir)
        self.gateway = Gateway(
            *(config.service, stock, catalog, self.texts, self.driver, supervisor, metrics),
            keys=None,
            kind="cpu",
        )

    def join(self) -> Wire:
        wire = Wire()
        self.driver.joined(wire, Hello(1, WORKER, b"", b"", 1, "cpu", "a CPU", 1 << 40))  # type: ignore[arg-type] # as much of a link as is needed
        return wire

    def close(self) -> None:
        self.registry.close()
        self.journal.close()
        self.texts.close()


@pytest.fixture
def deployed(data_dir: DataDir, converted: Path) -> Deployed:
    deployed = carry_out(DeployOrder(str(converted), "tiny"), data_dir, lambda *_: None)
    with Registry.open(data_dir) as registry:
        registry.add(deployed)
    return deployed


def with_office(data_dir: DataDir, scene: Callable[[Office], Awaitable[None]]) -> None:
    async def run() -> None:
        with closing(Office(data_dir)) as office:
            await scene(office)

    asyncio.run(run())


def ask(prompt: str | list[int] | Chat = "!!") -> Ask:
    return Ask("tiny", prompt, SamplingParams())


def test_a_prompt_is_encoded_and_checked(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(office: Office) -> None:
        encode = office.gateway.encode
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

    with_office(data_dir, scene)


def during_encoding(office: Office, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a prompt has been encoded."""
    encode = office.texts.encode

    async def encoded(*arguments: object) -> tuple[int, ...]:
        tokens = await encode(*arguments)  # type: ignore[arg-type] # passed on
        happens()
        return tokens

    monkeypatch.setattr(office.texts, "encode", encoded)


def test_what_happens_while_a_prompt_is_encoded_is_noticed(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(office: Office) -> None:
        with Registry.open(data_dir) as other:
            with monkeypatch.context() as patch:
                during_encoding(office, lambda: other.replace(replace(deployed, digest="1" * 32)), patch)
                with pytest.raises(ServiceError, match="`tiny` was replaced while the request was prepared"):
                    await office.gateway.submit(ask())
            with monkeypatch.context() as patch:
                during_encoding(office, lambda: other.remove("tiny") and None, patch)
                with pytest.raises(UnknownModel):
                    await office.gateway.submit(ask())
            other.add(deployed)
        with monkeypatch.context() as patch:
            during_encoding(office, office.gateway.end_all, patch)
            with pytest.raises(ShuttingDown):
                await office.gateway.submit(ask())
        assert office.driver.requests == {}

    with_office(data_dir, scene)


def test_a_text_that_breaks_fails_its_request_and_frees_the_worker(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(office: Office) -> None:
        wire = office.join()
        broken, other = await office.gateway.submit(ask()), await office.gateway.submit(ask())
        starts = [order for order in wire.orders if isinstance(order, StartRequest)]
        assert len(starts) == 2
        live = office.driver.requests[broken.request_id]
        step = StepDone(live.model, [start.run for start in starts], [5, 5])
        office.driver.hear(Heard(wire, 0, step, [], [live]))  # type: ignore[arg-type] # as much of a link as is needed
        with pytest.raises(EngineFailed, match=r"the text of request .* cannot be made of its tokens"):
            await broken.next()
        assert wire.orders[-1] == CancelRequest(starts[0].run)
        assert set(office.driver.requests) == {other.request_id}
        office.gateway.end_all()

    with_office(data_dir, scene)


def spoken(office: Office, wire: Wire, *tokens: int, finished: bool = False) -> None:
    """Every run of the worker says these tokens, as the text thread hands them on."""
    for token in tokens:
        runs = {run: live for run, live in office.driver.runs.items() if live.worker == wire.worker}
        is_last = finished and token == tokens[-1]
        reasons = dict.fromkeys(runs, FinishReason.STOP) if is_last else {}
        said = []
        for run, live in runs.items():
            live.emitted.append(token)
            piece = live.transcript.push(token, reasons.get(run))
            said.append(Said(live, Piece(piece.text, token, None, piece.finish_reason)))
        step = StepDone(ModelId("tiny"), list(runs), [token] * len(runs), reasons)
        office.driver.hear(Heard(wire, 0, step, said))  # type: ignore[arg-type] # as much of a link as is needed


def test_a_request_is_on_its_way_in_the_turn_in_which_it_is_taken(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(office: Office) -> None:
        wire = office.join()
        await office.gateway.submit(ask())
        assert [type(order) for order in wire.orders] == [HostModel, StartRequest]
        await office.gateway.submit(ask())
        assert [type(order) for order in wire.orders] == [HostModel, StartRequest, StartRequest]
        office.gateway.end_all()

    with_office(data_dir, scene)


def test_a_request_whose_worker_is_lost_goes_on_with_all_that_was_said(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(office: Office) -> None:
        first = office.join()
        stream = await office.gateway.submit(ask())
        spoken(office, first, 5, 6)
        office.driver.hear(Heard(first, 0, None))  # type: ignore[arg-type] # as much of a link as is needed
        second = office.join()
        (before, after) = (
            next(order for order in wire.orders if isinstance(order, StartRequest))
            for wire in (first, second)
        )
        assert (before.output, after.output) == ((), (5, 6))
        assert (before.prompt, before.sampling) == (after.prompt, after.sampling)
        assert before.run != after.run
        spoken(office, second, 7, finished=True)
        assert [piece.token for piece in await stream.next()] == [5, 6, 7]
        explained = office.gateway.explain(stream.request_id)
        assert explained is not None
        assert (explained.outcome, explained.num_resumes, explained.num_output_tokens) == ("stop", 1, 3)

    with_office(data_dir, scene)


def test_a_stop_string_ends_the_answer_and_frees_the_worker(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(office: Office) -> None:
        wire = office.join()
        tokenizer = await office.gateway.tokenizer("tiny")
        (token, *_) = tokenizer.encode("!", add_special_tokens=False)
        stream = await office.gateway.submit(Ask("tiny", "!!", SamplingParams(stop=["!"])))
        spoken(office, wire, token)
        assert [piece.finish_reason for piece in await stream.next()] == [FinishReason.STOP]
        assert isinstance(wire.orders[-1], CancelRequest)
        assert not office.driver.requests

    with_office(data_dir, scene)
