"""Frames and the handshake: what is taken, and what is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core import wire
from hearth.core.errors import ServiceError
from hearth.core.messages import (
    VERSION,
    Admitted,
    Challenge,
    Ping,
    StartRequest,
    StepDone,
    Welcome,
    WorkerHello,
    WorkerSetup,
)
from hearth.core.types import (
    FinishReason,
    GuideSpec,
    ModelId,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    WorkerId,
)

SECRET = b"s" * 32
WORKER = WorkerId("w0")


def hello(nonce: bytes, secret: bytes = SECRET, version: int = VERSION) -> WorkerHello:
    proof = wire.proof(secret, nonce, WORKER)
    return WorkerHello(version, WORKER, b"n" * 32, proof, 1, "cpu", "a CPU", 1 << 30, False)


def body(frame: bytes) -> bytes:
    length = wire.length_of(frame[: wire.HEADER.size])
    assert len(frame) == wire.HEADER.size + length
    return frame[wire.HEADER.size :]


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**31)), max_size=20),
    st.booleans(),
)
def test_a_step_arrives_as_it_was_sent(pairs: list[tuple[int, int]], with_logprobs: bool) -> None:
    runs, tokens = [run for run, _ in pairs], [token for _, token in pairs]
    logprobs = [TokenLogprobs(-0.5, (TokenLogprob(token, -0.5),)) for token in tokens]
    step = StepDone(
        model=ModelId("m"),
        runs=runs,
        tokens=tokens,
        finished=dict.fromkeys(runs[:1], FinishReason.STOP),
        logprobs=[*logprobs] if with_logprobs else None,
        admitted=[Admitted(run, 16, 0.25) for run in runs[:2]],
        preempted=runs[2:3],
        step_s=0.5,
    )
    assert wire.fact_of(body(wire.frame(step))) == step


def test_a_request_arrives_with_all_that_shapes_its_output() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=9, max_tokens=None, logit_bias={7: -1.5}, allowed_token_ids=(1, 7)
    )
    order = StartRequest(
        run=5,
        model=ModelId("m"),
        prompt=(1, 2),
        output=(3,),
        sampling=params,
        salt=b"salt",
        guide=GuideSpec("json_schema", "{}"),
    )
    received = wire.order_of(body(wire.frame(order)))
    assert received == order


def test_whoever_knows_the_secret_is_welcome_and_told_so() -> None:
    nonce = wire.new_nonce()
    said = hello(nonce)
    welcome = wire.check_hello(said, SECRET, nonce)
    wire.check_welcome(welcome, SECRET, said.nonce, WORKER)


def test_another_secret_is_refused_on_either_side() -> None:
    nonce = wire.new_nonce()
    with pytest.raises(ServiceError, match="does not know the secret"):
        wire.check_hello(hello(nonce, secret=b"x" * 32), SECRET, nonce)
    forged = wire.check_hello(hello(nonce, secret=b"x" * 32), b"x" * 32, nonce)
    with pytest.raises(ServiceError, match="gateway does not know"):
        wire.check_welcome(forged, SECRET, b"n" * 32, WORKER)


def test_a_proof_is_good_for_one_nonce_alone() -> None:
    with pytest.raises(ServiceError, match="secret"):
        wire.check_hello(hello(wire.new_nonce()), SECRET, wire.new_nonce())


def test_a_workers_proof_cannot_be_given_back_as_the_gateways() -> None:
    said = hello(b"n" * 32)
    with pytest.raises(ServiceError, match="gateway does not know"):
        wire.check_welcome(Welcome(said.proof), SECRET, b"n" * 32, WORKER)


def test_another_version_is_refused_with_both_numbers() -> None:
    nonce = wire.new_nonce()
    with pytest.raises(ServiceError, match=f"version 99, this side {VERSION}"):
        wire.check_hello(hello(nonce, version=99), SECRET, nonce)
    with pytest.raises(ServiceError, match="version 0"):
        wire.check_challenge(Challenge(0, nonce))


@given(st.binary(max_size=200))
def test_no_bytes_are_worse_than_refused(junk: bytes) -> None:
    for decode in (wire.fact_of, wire.order_of, wire.challenge_of):
        with suppress(ServiceError):
            decode(junk)


def test_a_hello_whose_text_is_none_is_refused() -> None:
    said = body(wire.frame(hello(b"n" * 32))).replace(b"a CPU", b"a \xffPU")
    with pytest.raises(ServiceError, match="holds no message"):
        wire.fact_of(said)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ServiceError, match=r"bytes, limit: 67108864"):
        wire.length_of(wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1))


def test_an_order_is_no_fact() -> None:
    with pytest.raises(ServiceError, match="no message"):
        wire.fact_of(body(wire.frame(Ping(1))))


def test_messages_that_are_shown_hold_no_secret_and_no_words_of_users() -> None:
    order = StartRequest(3, ModelId("tiny"), (4242, 77), (99,), SamplingParams(seed=1), b"the salt")
    setup = WorkerSetup(WORKER, "", 1, "the secret", "cpu", 0, 1, None, "", "", {}, None, "info", "")

    assert repr(order) == "<StartRequest run=3 model=tiny num_prompt_tokens=2 num_output_tokens=1>"
    assert "the secret" not in f"{setup!r} {setup}"
    assert "the salt" not in f"{[order]} {order}"
