"""Verdicts on the answers that honest clients got. Pure: reads no clock and no socket.

right          every token of the reference, one end, and nothing behind it
honest error   a status or an error event that says what happened, and where it should, when to try again
lost           the connection ended without an end, the end never came, or it came twice
wrong          a token that is not the reference's, or an error that the question did not deserve
cut            lost while the gateway itself was killed or not up yet
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bench.service.client import Answer, Reply, read

#: What a right question may be refused with: too much at once, something broke, or a disk is full.
HONEST_STATUS = frozenset([429, 503, 507])
#: Codes of errors that say nothing of what happened.
VAGUE_CODES = frozenset(["internal", "None", ""])
MAX_RETRY_S = 3600


class Ending(StrEnum):
    """The ways in which a request ends."""

    RIGHT = "right"
    HONEST_ERROR = "honest_error"
    LOST = "lost"
    WRONG = "wrong"
    CUT = "cut_by_gateway_kill"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ending of one request, and what a reader needs to know of it."""

    ending: Ending
    detail: str = ""  #: code and message of an honest error, or what is missing or wrong
    first_s: float | None = None  #: from the question to the first token; of right answers that streamed
    pace_s: float | None = None  #: from one token to the next, on average; likewise


def judge(reply: Reply, text: str, num_tokens: int, *, is_cut: bool, has_ended: bool = True) -> Verdict:
    """Return the verdict on a reply.

    `text`, `num_tokens`: the only right answer. `is_cut`: the gateway was killed, or not up, while the
    question was open. `has_ended`: False if the client gave up before an end came.
    """
    answer = read(reply)
    if not text.startswith(answer.text):
        return Verdict(Ending.WRONG, f"text {answer.text!r}, right: {text!r}")
    if not has_ended or not reply.is_whole:
        missing = "no end came" if not has_ended else "the connection ended" if reply.head else "no answer"
        return Verdict(Ending.CUT if is_cut else Ending.LOST, missing)
    if (fault := _ends_amiss(reply, answer)) is not None:
        return Verdict(Ending.LOST, fault)
    if answer.error is not None:
        fault = _dishonesty(reply, answer.error)
        if fault is not None:
            return Verdict(Ending.WRONG, fault)
        return Verdict(Ending.HONEST_ERROR, f"{answer.error}: {_error_of(reply)['message']}")
    if answer.text != text or answer.num_tokens != num_tokens:
        return Verdict(
            Ending.WRONG,
            f"{answer.num_tokens} tokens {answer.text!r}, right: {num_tokens} tokens {text!r}",
        )
    return Verdict(Ending.RIGHT, "", *_times(answer))


def _times(answer: Answer) -> tuple[float | None, float | None]:
    """Return the first token and the pace of an answer that was a stream."""
    if answer.reply.header("content-length") is not None or answer.num_tokens is None:
        return None, None
    spent_s = answer.events[-1].at_s - answer.events[0].at_s
    return answer.first_s, spent_s / max(1, answer.num_tokens - 1)


def _ends_amiss(reply: Reply, answer: Answer) -> str | None:
    """Return what is wrong with the end of a stream; None for one that ends once, and for other replies."""
    if reply.status != 200 or reply.header("content-length") is not None:
        return None
    lines = [line for _, data in reply.reads for line in data.split(b"\n") if line.startswith(b"data: ")]
    num_finished = sum(b'"finish_reason":"' in line for line in lines)
    num_done = lines.count(b"data: [DONE]")
    num_errors = sum(line.startswith(b'data: {"error"') for line in lines)
    if num_finished + num_errors != 1 or num_done != num_finished:
        return f"{num_finished} finish reasons, {num_errors} errors and {num_done} ends in one answer"
    if answer.error is None and lines[-1] != b"data: [DONE]":
        return f"events after the end: {lines[-1][:80]!r}"
    if answer.error is not None and not lines[-1].startswith(b'data: {"error"'):
        return f"events after the error: {lines[-1][:80]!r}"
    return None


def _dishonesty(reply: Reply, code: str) -> str | None:
    """Return what an error fails to say, or says wrongly; None for an honest one."""
    if reply.status not in (200, *HONEST_STATUS):
        return f"status {reply.status}, code {code}: {reply.body[-200:]!r}"
    if code in VAGUE_CODES or not _error_of(reply).get("message"):
        return f"an error that says nothing: {reply.body[-200:]!r}"
    retry_after = reply.header("retry-after")
    if reply.status == 429 and retry_after is None:
        return f"429 without a time to try again: {reply.body[-200:]!r}"
    if retry_after is not None and not (retry_after.isdigit() and 1 <= int(retry_after) <= MAX_RETRY_S):
        return f"Retry-After is {retry_after!r}, must be 1 to {MAX_RETRY_S} s"
    return None


def _error_of(reply: Reply) -> Mapping[str, object]:
    """Return the error object of a reply, or of the last event of its stream; empty if it has none."""
    body = reply.body
    if reply.status == 200:
        body = next(
            (line[6:] for line in reversed(body.split(b"\n")) if line.startswith(b'data: {"error"')), b"{}"
        )
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
