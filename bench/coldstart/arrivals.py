"""Requests that come to a model which nobody has used yet, with a snapshot and without.

    burst      all at once, many tokens each: how even are its first steps?
    poisson    one by one, at random, with the lengths of real conversations: who waits for the first token?

The model is in host memory, and its worker's process is new: without a snapshot every size of a step is
captured when it is first needed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from statistics import median

from bench.coldstart.part import Part, figures_of_peers
from bench.coldstart.setting import ServiceKind, Setting
from bench.coldstart.snapshot_use import SnapshotUse
from bench.report import Row, percentiles, step
from bench.service.client import Answer, Connection, Reply, ask_all, completion, read, uncollected
from bench.service.gaps import Gap
from bench.service.process import Service
from bench.service.streams import good
from bench.sharegpt import Lengths, conversations
from hearth.core.types import SnapshotOutcome

MODEL = "7B"
ARMS = {"restored": True, "captured": False}  #: whether there are snapshots
AIM_STEP = 2.0  #: times the median
_SEED = 9
#: For the first tokens of those that came last.
_PATIENCE_S, _LOOK_S = 60.0, 0.02


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to come."""

    due_s: float  #: after the first possible moment
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Steps of streams that began together, once all of them run: before that they hold prompts."""

    longest_over_median: float
    longest_at_s: float  #: when the longest began, from the question
    longest_but_last_over_median: float  #: without each stream's last, with which all of them end at once
    step_s: Mapping[str, float]
    first_s: Mapping[str, float]  #: until the first token, from the question
    all_run_s: float  #: until the last of the first tokens
    total_s: float  #: until the last token


def _new_worker(setting: Setting, *, has_snapshots: bool) -> Service:
    """Return a service whose worker is new, with the model in host memory."""
    service = setting.service(ServiceKind(has_snapshots, is_small=True))
    setting.ask(service, MODEL)
    setting.replace_worker()
    return service


def _problem(used: SnapshotUse, *, has_snapshots: bool) -> str | None:
    if has_snapshots:
        return used.problem
    return "a snapshot was used where there should be none" if used.counts.get(SnapshotOutcome.USED) else None


def burst(setting: Setting) -> Part:
    """Ask for many streams at once, as soon as a worker can host models."""
    setting.need(MODEL)
    scale, found, problems = setting.scale, dict[str, dict[str, object]](), list[str]()
    rows = list[Row]()
    what = f"{MODEL}: first {scale.burst_tokens} tokens of {scale.burst_requests} requests at once"
    for name, has_snapshots in ARMS.items():
        with step(f"burst, {name}"):
            service = _new_worker(setting, has_snapshots=has_snapshots)
            watch = setting.watch(service)
            steps = first_steps(ask_at_once(setting, service))
        used = watch.use(int(has_snapshots))
        if (problem := _problem(used, has_snapshots=has_snapshots)) is not None:
            problems.append(f"{name}: {problem}")
        found[name] = {**asdict(steps), "snapshots": used.as_json()}
        aim = f"at most {AIM_STEP:g} times" if has_snapshots else None
        rows += [
            Row(
                f"{what}, {name}: longest step over the median", "times", steps.longest_over_median, None, aim
            ),
            Row(f"{what}, {name}: first token p99", "s", steps.first_s["p99"]),
            Row(f"{what}, {name}: until the last is answered", "s", steps.total_s),
        ]
    return Part(rows, found, "; ".join(problems) or None)


def ask_at_once(setting: Setting, service: Service) -> list[Answer]:
    """Ask for many streams at once, and return them when all have ended."""
    scale = setting.scale
    prompts = setting.prompts(MODEL).take(scale.burst_requests)
    questions = [completion(MODEL, prompt, scale.burst_tokens) for prompt in prompts]
    with uncollected(), asyncio.Runner() as runner:
        return [good(reply) for reply in runner.run(ask_all(service.port, questions))]


def first_steps(answers: Sequence[Answer]) -> FirstSteps:
    """Return how even the steps were of streams that began together, by the gaps between their tokens."""
    all_run_s = max(answer.events[0].at_s for answer in answers)
    gaps = [
        Gap(before.at_s, after.at_s)
        for answer in answers
        for before, after in pairwise(answer.events)
        if before.at_s >= all_run_s
    ]
    gaps_s, longest = [gap.seconds for gap in gaps], max(gaps, key=lambda gap: gap.seconds)
    last_s = {answer.events[-1].at_s for answer in answers}
    others_s = [gap.seconds for gap in gaps if gap.end_s not in last_s]
    asked_s = min(answer.reply.asked_s for answer in answers)
    return FirstSteps(
        longest_over_median=longest.seconds / median(gaps_s),
        longest_at_s=longest.begin_s - asked_s,
        longest_but_last_over_median=max(others_s, default=0.0) / median(gaps_s),
        step_s=percentiles(gaps_s),
        first_s=percentiles([answer.first_s for answer in answers]),
        all_run_s=all_run_s - asked_s,
        total_s=max(answer.events[-1].at_s for answer in answers) - asked_s,
    )


def poisson(setting: Setting) -> Part:
    """Have requests come at random to a model that nobody has used yet."""
    setting.need(MODEL)
    scale, found, problems = setting.scale, dict[str, dict[str, object]](), list[str]()
    for name, has_snapshots in reversed(ARMS.items()):  # for a service without snapshots may still run
        for rate_per_s in scale.rates_per_s:
            with step(f"poisson, {name}, {rate_per_s:g} requests/s"):
                service = _new_worker(setting, has_snapshots=has_snapshots)
                watch = setting.watch(service)
                coming = arrivals(rate_per_s, scale.arrivals_s)
                with uncollected(), asyncio.Runner() as runner:
                    first_s = runner.run(_first_texts_s(service.port, setting, coming))
            used = watch.use(int(has_snapshots))
            found[f"{name}, {rate_per_s:g}/s"] = {
                "first_s": percentiles(first_s),
                "mean_s": sum(first_s) / len(first_s),
                "snapshots": used.as_json(),
            }
            if (problem := _problem(used, has_snapshots=has_snapshots)) is not None:
                problems.append(f"{name}, {rate_per_s:g}/s: {problem}")
    return Part(_poisson_rows(setting, found), found, "; ".join(problems) or None)


def _poisson_rows(setting: Setting, found: dict[str, dict[str, object]]) -> list[Row]:
    rows = []
    for rate_per_s in setting.scale.rates_per_s:
        p99_s = dict[str, float]()
        for name in ARMS:
            first_s = found[f"{name}, {rate_per_s:g}/s"]["first_s"]
            assert isinstance(first_s, dict)
            p99_s[name] = first_s["p99"]
            measure = f"{MODEL}: first token p99, {rate_per_s:g} requests/s from a cold start, {name}"
            rows.append(Row(measure, "s", p99_s[name]))
        measure = f"{MODEL}: first token p99, {rate_per_s:g} requests/s, restored over captured"
        ratio, peers = p99_s["restored"] / p99_s["captured"], figures_of_peers("p99 ratio")
        rows.append(Row(measure, "times", ratio, None, None, peers, is_comparable=False))
    return rows


def arrivals(rate_per_s: float, seconds: float) -> list[Arrival]:
    """Return requests of a Poisson process with lengths of real conversations; one comes at once."""
    draw, due_s, coming = Random(_SEED), 0.0, list[Arrival]()
    while due_s < seconds:
        coming.append(Arrival(due_s, conversations()[len(coming)]))
        due_s += draw.expovariate(rate_per_s)
    return coming


async def _first_texts_s(port: int, setting: Setting, coming: Sequence[Arrival]) -> list[float]:
    """Ask as requests come and return how long each waited for text; what still runs then is called off."""
    draw, shape = Random(_SEED), setting.scale.shapes[MODEL]
    most = shape.arch.max_positions
    connections: list[Connection] = []
    asked: list[asyncio.Task[Reply]] = []
    began_s = time.perf_counter()
    for one in coming:
        prompt = [draw.randrange(shape.arch.vocab_size) for _ in range(min(one.lengths.prompt, most // 2))]
        question = completion(MODEL, prompt, min(one.lengths.new, most // 2))
        await asyncio.sleep(began_s + one.due_s - time.perf_counter())
        connections.append(await Connection.open(port))
        asked.append(asyncio.create_task(connections[-1].ask(question)))
    deadline_s = time.perf_counter() + _PATIENCE_S
    for connection, task in zip(connections, asked, strict=True):
        while not task.done() and not connection.has_text and time.perf_counter() < deadline_s:
            await asyncio.sleep(_LOOK_S)
        connection.close()
    answers = [read(reply) for reply in await asyncio.gather(*asked)]
    silent = [answer for answer in answers if not answer.events]
    if silent:
        raise RuntimeError(f"{len(silent)} of {len(answers)} requests got no text: {silent[0].error}")
    return [answer.first_s for answer in answers]
