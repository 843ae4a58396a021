"""Outcomes of the requests of a run, and the measures of it. Pure: reads no clock and no socket."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.report import percentiles
from bench.service.client import Answer, Reply, read
from bench.turns.replay import Replayed
from bench.turns.setting import FIRST_TOKEN_S, TOKENS_PER_S
from bench.turns.workload import Question

#: A token of a random model is ` wNUMBER` or one character; an event may hold several.
_TOKEN = re.compile(r" w\d+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request. Seconds count from its arrival in the trace."""

    model: str
    arrival_s: float  #: after the first request of the run
    num_prompt_tokens: int
    num_wanted_tokens: int
    num_tokens: int  #: that came
    num_on_time: int  #: of those
    first_s: float  #: the first token; where none came, the end of the run, as for all that is missing
    longest_pause_s: float  #: between two tokens; 0 where there is no such thing
    total_s: float
    is_whole: bool  #: all tokens came, without an error
    error: str | None = None
    asked_s: float = 0.0  #: when the client had sent it, whose timers are late or early by a millisecond

    @property
    def is_on_time(self) -> bool:
        """True if every token was on time."""
        return self.num_on_time == self.num_wanted_tokens


@dataclass(frozen=True, slots=True)
class Heard:
    """The tokens of a request as its client heard them, by its own clock."""

    token_times_s: Sequence[float]
    error: str | None = None


def hear(reply: Reply | None) -> Heard:
    """Return what a reply says; None: the request was never sent."""
    if reply is None:
        return Heard([])
    answer = read(reply)
    return Heard(token_times(answer), answer.error)


def outcomes(questions: Sequence[Question], heard: Sequence[Heard], replayed: Replayed) -> list[Outcome]:
    """Return the outcome of each question of a replay."""
    found = []
    for question, one, reply in zip(questions, heard, replayed.replies, strict=True):
        arrived_s = replayed.began_s + question.arrival_s
        times_s = [at_s - arrived_s for at_s in one.token_times_s]
        found_one = outcome(question, times_s, replayed.ended_s - arrived_s, one.error)
        asked_s = 0.0 if reply is None else reply.asked_s - arrived_s
        found.append(replace(found_one, asked_s=asked_s))
    return found


def outcome(question: Question, times_s: Sequence[float], until_s: float, error: str | None) -> Outcome:
    """Return the outcome of a question whose tokens came at these times, in a run that lasted `until_s`."""
    wanted = question.num_output_tokens
    is_whole = error is None and len(times_s) >= wanted
    ends_s = times_s if is_whole else [*times_s, max([until_s, *times_s])]
    gaps_s = [after - before for before, after in zip(times_s, ends_s[1:], strict=False)]
    return Outcome(
        question.model,
        *(question.arrival_s, question.num_prompt_tokens, wanted, len(times_s)),
        num_on_time=sum(at_s <= due_s(number) for number, at_s in enumerate(times_s[:wanted])),
        first_s=ends_s[0],
        longest_pause_s=max(gaps_s, default=0.0),
        total_s=ends_s[-1],
        is_whole=is_whole,
        error=error,
    )


def due_s(number: int) -> float:
    """Return when a token is due after its request's arrival; the first one is number 0."""
    return FIRST_TOKEN_S + number / TOKENS_PER_S


def token_times(answer: Answer) -> list[float]:
    """Return when each token came; tokens that cannot be told from others came with the last."""
    times_s = [event.at_s for event in answer.events for _ in _TOKEN.findall(event.text)]
    if answer.num_tokens is None or not times_s:
        return times_s
    return times_s[: answer.num_tokens] + [times_s[-1]] * (answer.num_tokens - len(times_s))


@dataclass(frozen=True, slots=True)
class Measures:
    """A run as its clients saw it, in seconds."""

    num_requests: int
    num_unfinished: int  #: when the run was cut off
    errors: Mapping[str, int]
    first_token_s: Mapping[str, float]
    longest_pause_s: Mapping[str, float]
    completion_s: Mapping[str, float]
    requests_on_time: float  #: the share with every token on time
    tokens_on_time: float  #: the share of all tokens that were asked for
    tokens_per_s: float  #: from the first arrival to the last end


def measures(found: Sequence[Outcome], seconds: float) -> Measures:
    """Sum up a run that took so long."""
    num_wanted = sum(each.num_wanted_tokens for each in found)
    return Measures(
        num_requests=len(found),
        num_unfinished=sum(not each.is_whole and each.error is None for each in found),
        errors=dict(Counter(each.error for each in found if each.error is not None)),
        first_token_s=percentiles([each.first_s for each in found]),
        longest_pause_s=percentiles([each.longest_pause_s for each in found]),
        completion_s=percentiles([each.total_s for each in found]),
        requests_on_time=share(each.is_on_time for each in found),
        tokens_on_time=sum(each.num_on_time for each in found) / num_wanted,
        tokens_per_s=sum(each.num_tokens for each in found) / seconds,
    )


def share(values: Iterable[bool]) -> float:
    counted = list(values)
    return sum(counted) / len(counted)
