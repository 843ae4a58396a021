"""The figures of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.policy.fleet.gpu_time import cost_of
from hearth.sim.service import SimulatedService


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles | None:
        if not values:
            return None
        ranked = sorted(values)
        p50, p90, p99 = (ranked[max(0, -(-percent * len(ranked) // 100) - 1)] for percent in (50, 90, 99))
        return Percentiles(p50, p90, p99, ranked[-1])


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The figures of a workload. All tokens of a refused request are late. Becomes JSON."""

    policy: str
    num_workers: int
    num_nodes: int
    num_models: int
    num_requests: int
    num_refused: int
    refusals: dict[str, int]  #: how many of these for each reason
    simulated_s: float  #: from the beginning of the trace to the end of the last answer
    first_token_s: Percentiles | None  #: of requests that got one
    completion_s: Percentiles | None  #: of whole answers
    longest_pause_s: Percentiles | None  #: the longest between two tokens of an answer, of whole answers
    requests_on_time: float  #: share of requests with every token on time
    tokens_on_time: float
    tokens_per_s: float  #: sent, from the first arrival to the last end
    cold_starts: dict[str, int]  #: requests that waited for a load, by where it came from
    host_bytes: int  #: of weights in host memory, on the machine that had most
    num_prewarmed: int  #: orders to load a model ahead
    num_kv_moves: int  #: requests that moved with their KV
    num_turns: int
    pauses_per_request: float
    num_loads: int
    bytes_moved: int
    bytes_fetched: int  #: by machines from others
    bytes_read: int  #: by machines from their disks
    gpu_s: float  #: devices were held, until the end of the last answer: see `gpu_time.py`
    gpu_s_by_model: dict[str, float]  #: the share of each model
    gpu_s_by_key: dict[str, float]  #: of requests with an API key: without idle time
    idle_gpu_s: float  #: of `gpu_s`, by models without a running request
    most_gpus: int  #: that were held at a time
    cost: float | None  #: of `gpu_s`; None: no price was given
    cost_by_model: dict[str, float | None]
    cost_by_key: dict[str, float | None]
    bus_share: float  #: of the time of all workers: bytes were on their way
    step_share: float  #: of the time of all workers: a step ran
    num_steps: int
    num_preempted: int  #: requests that lost their KV, and were computed again
    cached_share: float  #: of all tokens of prompts: found in the prefix cache


def cold_starts_of(service: SimulatedService) -> Counter[str]:
    """Return how many requests waited for a load, by where it came from."""
    workers = [*service.workers.values(), *service.given_back]
    return sum((worker.loads.cold_starts for worker in workers), Counter())


def report_of(service: SimulatedService) -> SimulationReport:
    answers, workers = list(service.answers.values()), [*service.workers.values(), *service.given_back]
    on_time = service.setting.on_time
    num_on_time = [answer.count_on_time(on_time) for answer in answers]
    whole = [answer for answer in answers if answer.why_not is None]
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    num_punctual = sum(num == one.num_output_tokens for num, one in zip(num_on_time, answers, strict=True))
    began_s = min((answer.arrived_s for answer in answers), default=0.0)
    ended_s = max((answer.ended_s or 0.0 for answer in answers), default=0.0)
    all_s = max(1e-9, ended_s) * max(1, len(service.workers))
    gpu_s, price = service.gpu_s, service.setting.device_hour_price
    return SimulationReport(
        policy=service.setting.policy,
        num_workers=len(service.workers),
        num_nodes=service.setting.num_nodes,
        num_models=len(service.setting.shapes),
        num_requests=len(answers),
        num_refused=len(answers) - len(whole),
        refusals=dict(Counter(answer.why_not for answer in answers if answer.why_not is not None)),
        simulated_s=ended_s,
        first_token_s=Percentiles.of([one.first_token_s for one in answers if one.token_s]),
        completion_s=Percentiles.of([one.completion_s for one in whole]),
        longest_pause_s=Percentiles.of([one.longest_pause_s for one in whole]),
        requests_on_time=num_punctual / max(1, len(answers)),
        tokens_on_time=sum(num_on_time) / max(1, num_tokens),
        tokens_per_s=sum(len(one.token_s) for one in answers) / max(1e-9, ended_s - began_s),
        cold_starts=dict(cold_starts_of(service)),
        host_bytes=service.most_host_bytes,
        num_prewarmed=service.num_prewarmed,
        num_kv_moves=service.num_kv_moves,
        num_turns=len(service.turns_s),
        pauses_per_request=sum(one.num_pauses for one in answers) / max(1, len(answers)),
        num_loads=sum(worker.loads.num_ended for worker in workers),
        bytes_moved=sum(worker.loads.bytes_moved for worker in workers),
        bytes_fetched=service.network.bytes_fetched,
        bytes_read=service.network.bytes_read,
        gpu_s=gpu_s,
        gpu_s_by_model={str(model): seconds for model, seconds in service.gpu_s_by_model.items()},
        gpu_s_by_key=service.gpu_s_by_key,
        idle_gpu_s=service.idle_gpu_s,
        most_gpus=service.fleet.gpu_time.most,
        cost=cost_of(gpu_s, price),
        cost_by_model={
            str(model): cost_of(seconds, price) for model, seconds in service.gpu_s_by_model.items()
        },
        cost_by_key={key: cost_of(seconds, price) for key, seconds in service.gpu_s_by_key.items()},
        bus_share=sum(worker.loads.bus_s for worker in workers) / all_s,
        step_share=sum(worker.step_s for worker in workers) / all_s,
        num_steps=sum(worker.num_steps for worker in workers),
        num_preempted=sum(worker.num_preempted for worker in workers),
        cached_share=sum(one.num_cached_tokens for one in answers)
        / max(1, sum(one.num_prompt_tokens for one in answers)),
    )
