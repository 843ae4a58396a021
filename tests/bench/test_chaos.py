"""The chaos run can fail: it tells lost, wrong and dishonest answers from right ones, growth from none."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from bench.chaos.clients import NUM_TOKENS, Asked, HonestClients, Probe, violations
from bench.chaos.faults import FAULTS, Struck
from bench.chaos.flatness import KEEPER_THREADS, Flatness, Look, growth
from bench.chaos.nodes import Passage
from bench.chaos.outcome import Ending, Verdict, judge
from bench.chaos.report import FELT_S, Span, compared, endings, errors
from bench.chaos.schedule import windows
from bench.failing_disk import allow_writes, failing_writes
from bench.service.client import Reply
from bench.service.process import ProcessId, started_ticks
from bench.soak.load import Reference
from bench.soak.watch import SLACK, Sample

TEXT = " w7" * NUM_TOKENS
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
END = b"\r\n0\r\n\r\n"


def chunk(text: str, reason: str | None = None) -> bytes:
    choice = {"text": text, "finish_reason": reason}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}, separators=(",", ":")).encode()


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % NUM_TOKENS
DONE = b"data: [DONE]\n\n"
RIGHT = (*[chunk(" w7")] * NUM_TOKENS, chunk("", "length"), USAGE, DONE)
ERROR = (
    b'data: {"error": {"message": "workers kept dying", "type": "server_error", "code": "workers_lost"}}\n\n'
)


def stream(*events: bytes, is_whole: bool = True) -> Reply:
    reads = [(1.0 + number / 10, event) for number, event in enumerate((STREAM_HEAD + b"\r\n\r\n", *events))]
    return Reply(1.0, reads, STREAM_HEAD, is_whole)


def refusal(status: int, error: object, *headers: str) -> Reply:
    body = json.dumps({"error": error}).encode()
    lines = [f"HTTP/1.1 {status} No", f"content-length: {len(body)}", *headers]
    head = "\r\n".join(lines).encode()
    return Reply(1.0, [(1.1, head + b"\r\n\r\n" + body)], head, is_whole=True)


def verdict(reply: Reply, **how: bool) -> Verdict:
    return judge(reply, TEXT, NUM_TOKENS, **{"is_cut": False, **how})


# Verdicts.


def test_an_answer_with_every_token_and_one_end_is_right_and_timed() -> None:
    found = verdict(stream(*RIGHT))

    assert found.ending is Ending.RIGHT
    assert found.first_s == pytest.approx(0.1)
    assert found.pace_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "reply",
    [
        stream(*RIGHT[:5], chunk(" w8"), *RIGHT[6:]),
        stream(*RIGHT[1:]),
        stream(chunk(" w7"), *RIGHT),
        stream(*RIGHT[:3], chunk(" w8"), is_whole=False),
        stream(chunk(" w8"), ERROR),
    ],
    ids=["another token", "one less", "one more", "wrong before it broke off", "wrong before an error"],
)
def test_a_token_that_is_not_the_references_is_wrong(reply: Reply) -> None:
    assert verdict(reply).ending is Ending.WRONG


@pytest.mark.parametrize(
    "reply",
    [
        Reply(1.0),
        stream(*RIGHT[:5], is_whole=False),
        stream(*RIGHT[:5]),
        stream(*RIGHT, is_whole=False),
        stream(*RIGHT[:-1], ERROR),
        stream(*RIGHT, DONE),
        stream(*RIGHT[:-3], chunk("", "length"), *RIGHT[-3:]),
        stream(ERROR, ERROR),
        stream(ERROR, chunk(" w7")),
    ],
    ids=["nothing", "broken off", "no end", "cut at the end", "end and error", "done twice", "finished twice",
         "two errors", "more after an error"],
)  # fmt: skip
def test_an_answer_that_does_not_end_once_is_lost(reply: Reply) -> None:
    assert verdict(reply).ending is Ending.LOST


def test_an_answer_that_never_ends_is_lost() -> None:
    assert verdict(stream(*RIGHT[:5], is_whole=False), has_ended=False).ending is Ending.LOST


def test_a_killed_gateway_excuses_a_broken_connection_but_no_wrong_token() -> None:
    assert verdict(stream(*RIGHT[:5], is_whole=False), is_cut=True).ending is Ending.CUT
    assert verdict(stream(chunk(" w8"), is_whole=False), is_cut=True).ending is Ending.WRONG
    assert verdict(stream(*RIGHT), is_cut=True).ending is Ending.RIGHT


@pytest.mark.parametrize(
    "reply",
    [
        stream(*RIGHT[:5], ERROR),
        refusal(503, {"message": "no worker", "code": "workers_lost"}),
        refusal(503, {"message": "it failed to load", "code": "unreachable"}, "retry-after: 8"),
        refusal(429, {"message": "the queue is full", "code": "overloaded"}, "retry-after: 1"),
        refusal(507, {"message": "no room", "code": "store_full"}),
    ],
)
def test_an_error_that_says_what_happened_is_honest(reply: Reply) -> None:
    found = verdict(reply)
    assert found.ending is Ending.HONEST_ERROR
    (code,) = errors([Asked("m", "", 0.0, 1.0, found)])
    assert f'"{code}"'.encode() in reply.body


@pytest.mark.parametrize(
    "reply",
    [
        refusal(500, {"message": "internal error", "code": "internal"}),
        refusal(404, {"message": "no such model", "code": "model_not_found"}),
        refusal(503, {"message": "", "code": "store"}),
        refusal(503, {"message": "internal error", "code": "internal"}),
        refusal(429, {"message": "the queue is full", "code": "overloaded"}),
        refusal(503, {"message": "later", "code": "store"}, "retry-after: 10260"),
        refusal(503, {"message": "later", "code": "store"}, "retry-after: 0"),
    ],
    ids=["internal", "not deserved", "no message", "vague", "no time", "too long", "too short"],
)
def test_an_error_that_hides_what_happened_is_wrong(reply: Reply) -> None:
    assert verdict(reply).ending is Ending.WRONG


# Honest clients on real connections.

Behave = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def answer_right(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"\r\n\r\n" + b"".join(RIGHT) + END)


async def answer_wrong(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"\r\n\r\n" + chunk(" w8") + b"".join(RIGHT[1:]) + END)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"\r\n\r\n" + RIGHT[0])


async def never_end(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"\r\n\r\n" + RIGHT[0])
    await asyncio.sleep(60.0)


@pytest.mark.parametrize(
    ("behave", "ending"),
    [
        (answer_right, Ending.RIGHT),
        (answer_wrong, Ending.WRONG),
        (hang_up, Ending.LOST),
        (never_end, Ending.LOST),
    ],
)
def test_honest_clients_find_out_a_gateway_that_loses_or_changes_answers(
    behave: Behave, ending: Ending
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await behave(writer)
        finally:
            writer.close()

    async def ask(was_absent: bool) -> Asked:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reference = Reference("m", [1], TEXT)
        clients = HonestClients(port, "key", [reference], 1, lambda *_: was_absent, patience_s=0.5)
        await clients.ask()
        server.close()
        return clients.asked[0]

    asked = asyncio.run(ask(was_absent=False))

    assert asked.verdict.ending is ending
    assert bool(violations([asked], [])) is (ending is not Ending.RIGHT)


def test_a_health_probe_that_nobody_answers_is_told_unless_the_gateway_was_killed() -> None:
    probe = Probe(1.0, 10.0, is_answered=False, is_cut=False)

    assert violations([], [probe])
    assert not violations([], [replace(probe, is_cut=True), replace(probe, is_answered=True)])


# Faults.


def test_one_seed_gives_one_schedule_with_the_same_faults_with_and_without_attackers() -> None:
    planned = windows(10.0, 7, list(FAULTS))

    assert planned == windows(10.0, 7, list(FAULTS)) != windows(10.0, 8, list(FAULTS))
    assert sum(window.seconds for window in planned) == pytest.approx(600.0)
    for calm, attacked in zip(planned[::2], planned[1::2], strict=True):
        assert (calm.has_attackers, attacked.has_attackers) == (False, True)
        assert calm.strikes == attacked.strikes
        assert all(0.0 < strike.after_s < calm.seconds for strike in calm.strikes)
    assert {strike.fault for window in planned for strike in window.strikes} == set(FAULTS)
    assert not any(window.strikes for window in windows(1.0, 7, []))


def test_a_passage_that_is_cut_ends_connections_and_takes_none_until_it_is_whole_again() -> None:
    def open_one() -> socket.socket:
        return socket.create_connection(("127.0.0.1", passage.port), 10.0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        passage = Passage(listener.getsockname()[1])
        try:
            with open_one() as first:
                first.sendall(b"there")
                behind, _ = listener.accept()
                with behind:
                    assert behind.recv(5, socket.MSG_WAITALL) == b"there"
                    behind.sendall(b"back")
                    assert first.recv(4, socket.MSG_WAITALL) == b"back"
                    with passage.cut():
                        assert first.recv(1) == behind.recv(1) == b""
                        with open_one() as second:
                            assert second.recv(1) == b""
                    listener.accept()[0].close()  # of the second one
            with open_one() as third:
                third.sendall(b"again")
                behind, _ = listener.accept()
                with behind:
                    assert behind.recv(5, socket.MSG_WAITALL) == b"again"
        finally:
            passage.close()


def test_a_silent_passage_ends_nothing_and_passes_on_what_came_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        passage = Passage(listener.getsockname()[1])
        try:
            with socket.create_connection(("127.0.0.1", passage.port), 10.0) as near:
                far, _ = listener.accept()
                with far:
                    with passage.silent():
                        near.sendall(b"later")
                        far.settimeout(0.2)
                        with pytest.raises(TimeoutError):
                            far.recv(1)
                    far.settimeout(None)
                    assert far.recv(5, socket.MSG_WAITALL) == b"later"
                    with passage.slow(1e5):
                        began_s = time.monotonic()
                        near.sendall(bytes(20_000))
                        assert len(far.recv(20_000, socket.MSG_WAITALL)) == 20_000
                        assert time.monotonic() - began_s >= 0.2
        finally:
            passage.close()


def test_writes_of_a_process_fail_and_then_work_again() -> None:
    """On a real process, which has its file open all the time."""
    write = (
        "import sys, tempfile\n"
        "file = tempfile.TemporaryFile(buffering=0)\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        print(file.write(b'x'), flush=True)\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def written() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("write\n")
            return process.stdout.readline().strip()

        assert written() == "1"
        with failing_writes([process.pid]):
            assert written() == "OSError"
        assert written() == "1"
        process.stdin.close()
    allow_writes([process.pid])  # who is gone needs nothing


def test_a_process_is_alive_until_it_has_ended_whoever_gets_its_number() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticks = started_ticks(process.pid)
        assert ticks is not None
        assert ProcessId(process.pid, ticks).is_alive
        assert not ProcessId(process.pid, ticks + 1).is_alive
        process.kill()
        process.wait()
        assert not ProcessId(process.pid, ticks).is_alive


# Figures.


def looks(process: int, *num_fds: int, first_window: int = 0) -> list[Look]:
    """Three looks at a process after each window; it has so many descriptors then."""
    return [
        Look(window, ProcessId(process, 1), Sample(1 << 20, num, 8, 12))
        for window, num in enumerate(num_fds, first_window)
        for _ in range(3)
    ]


def test_growth_over_a_run_is_found_and_noise_is_none() -> None:
    flatness = Flatness()
    flatness.looks["gateway"] = looks(1, *(30 + 10 * window for window in range(10)))
    flatness.looks["keeper"] = looks(2, *(30 + window % 3 for window in range(10)))
    role, *lives = growth(flatness.changes())

    assert role == f"num_fds of the gateway grew from 55 to 115, limit: {55 * 1.15 + SLACK['num_fds']:.0f}"
    assert [told.partition(" grew ")[0] for told in lives] == ["num_fds of one gateway (1)"] * 2


def test_neither_the_first_round_nor_what_attackers_leave_for_a_while_is_growth() -> None:
    flatness = Flatness()
    flatness.looks["gateway"] = looks(1, 10, 10, *[30, 300] * 4)
    flatness.looks["worker"] = looks(2, 10, 10, 300, 300, 300)
    assert growth(flatness.changes()) == []


def test_growth_in_the_life_of_one_process_is_found_though_the_next_begins_anew() -> None:
    flatness = Flatness()
    flatness.looks["gateway"] = [
        *looks(1, 30, 30, 30, 30),
        *looks(2, 30, 30, 90, first_window=4),
        *looks(3, 30, 30, 30, first_window=7),
    ]
    limit = 30 * 1.15 + SLACK["num_fds"]
    assert growth(flatness.changes()) == [
        f"num_fds of one gateway (2) grew from 30 to 90, limit: {limit:.0f}"
    ]


@pytest.mark.parametrize(
    ("role", "num_threads", "is_growth"),
    [
        ("keeper", KEEPER_THREADS + 4, False),
        ("keeper", 2 * KEEPER_THREADS, True),
        ("worker", KEEPER_THREADS + 4, True),
    ],
)
def test_only_the_thread_pools_of_a_keeper_may_fill_late(
    role: str, num_threads: int, is_growth: bool
) -> None:
    flatness = Flatness()
    flatness.looks[role] = [
        Look(window, ProcessId(1, 1), Sample(1 << 20, 30, 18 if window < 5 else num_threads))
        for window in range(8)
    ]
    assert bool(growth(flatness.changes())) == is_growth


@pytest.mark.parametrize(("settle_s", "num_samples"), [(0.0, 1), (1e9, 0)])
def test_a_process_that_still_starts_is_not_sampled(settle_s: float, num_samples: int) -> None:
    flatness = Flatness(settle_s)
    flatness.look(0, {"gateway": [os.getpid()]}, num_tasks=12)
    assert len(flatness.looks["gateway"]) == num_samples


def test_requests_are_compared_by_window_and_by_whether_a_fault_was_near() -> None:
    def asked(at_s: float, first_s: float) -> Asked:
        return Asked("m", "", at_s, at_s + first_s, Verdict(Ending.RIGHT, "", first_s, first_s / 10))

    spans = [Span(False, 0.0, 100.0), Span(True, 100.0, 200.0)]
    struck = [Struck("worker_kill", 10.0, 11.0), Struck("worker_kill", 110.0, 111.0)]
    answers = [asked(10.5, 4.0), asked(50.0, 1.0), asked(110.5, 6.0), asked(150.0, 3.0)]
    found = compared(answers, [Probe(5.0, 0.1, is_answered=True, is_cut=False)], struck, spans)

    assert found["first_token"].ratio == 1.5
    assert found["first_token_clear"].ratio == 3.0
    assert found["pace_clear"].ratio == pytest.approx(3.0)
    assert found["health"].ratio is None
    assert compared([asked(11.0 + FELT_S + 1, 1.0)], [], struck, spans)["first_token_clear"].without
    assert endings(answers) == {
        "asked": 4,
        "right": 4,
        "honest_error": 0,
        "lost": 0,
        "wrong": 0,
        "cut_by_gateway_kill": 0,
    }
