"""How many prompt tokens are found in prefix caches when conversations are spread over four replicas.

    python -m bench.prefix_routing [--live] [--save]

A simulation with the costs of a measured device, and with the real brain, batcher and prefix index. Users
hold conversations with one model: each turn repeats all that was said before, adds a question, and comes some
time after the answer would be read. The same conversations are served by one replica, by four, and by four
whose brain knows nothing of prefixes. `ideal` is what a cache of any size would find.

The aim is the share of prompt tokens found with four replicas over that with one, at a load that one replica
can serve. The load of four times as many users is shown beside it: one replica has no memory for all of them.
With `--live`, the service holds conversations as well, with a tiny model on CPU workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from random import Random

from bench.prefix_service import measure_service
from bench.report import Row, arguments, emit
from hearth.core.types import ModelId
from hearth.policy.fleet.events import Event, ModelDeployed, RequestArrived
from hearth.sim.profile import Profile
from hearth.sim.report import SimulationReport, report_of
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.traces import Trace, TracedRequest

MODEL, SHAPE = ModelId("model"), "7B"
MEMORY_BYTES = 80 << 30
CONTEXT = 8192
LENGTH_S = 300.0
USERS = (24, 96)
NUM_REPLICAS = 4
#: Tokens of the first prompt, of a later question and of an answer; seconds to read and to think.
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = (200, 1500), (20, 300), (50, 400)
THINK_S = (5.0, 30.0)
MAX_TURNS = 10
AIM = 0.9


@dataclass(frozen=True, slots=True)
class Conversations:
    trace: Trace
    ideal_share: float  #: of all prompt tokens: said before


@dataclass(frozen=True, slots=True)
class Served:
    report: SimulationReport
    step_shares: list[float]  #: of the time of all steps, by replica

    @property
    def figures(self) -> dict[str, object]:
        shown = ("num_requests", "cached_share", "first_token_s", "completion_s", "num_preempted")
        figures = asdict(self.report)
        return {**{name: figures[name] for name in shown}, "step_shares": self.step_shares}


class UnawareService(SimulatedService):
    """A service whose brain is told nothing of prefixes."""

    def schedule(self, event: Event) -> None:
        super().schedule(replace(event, prefixes=()) if isinstance(event, RequestArrived) else event)


def draw_conversations(num_users: int, length_s: float, chooser: Random) -> Conversations:
    requests, num_repeated, num_conversations = list[TracedRequest](), 0, 0
    for _ in range(num_users):
        now_s = chooser.uniform(0.0, THINK_S[1])
        while now_s < length_s:
            num_said = 0
            for turn in range(chooser.randint(1, MAX_TURNS)):
                num_prompt = num_said + chooser.randint(*(QUESTION_TOKENS if turn else FIRST_TOKENS))
                num_answer = chooser.randint(*ANSWER_TOKENS)
                if now_s >= length_s or num_prompt + num_answer > CONTEXT:
                    break
                requests.append(TracedRequest(now_s, MODEL, num_prompt, num_answer, num_conversations))
                num_repeated += num_said
                num_said = num_prompt + num_answer
                now_s += chooser.uniform(*THINK_S)
            num_conversations += 1
    trace = Trace.of("conversations", requests)
    return Conversations(trace, num_repeated / sum(one.num_input_tokens for one in requests))


def serve(
    trace: Trace, num_replicas: int, profile: Profile, service_of: type[SimulatedService] = SimulatedService
) -> Served:
    setting = SimulationSetting({MODEL: SHAPE}, MEMORY_BYTES, num_workers=num_replicas, context=CONTEXT)
    service = service_of(setting, profile)
    pinned = replace(
        setting.model_profile(MODEL, profile.shape(SHAPE)), is_pinned=True, min_replicas=num_replicas
    )
    service.schedule(ModelDeployed(0.0, pinned))
    service.ask(trace.requests)
    service.run()
    service.check()
    step_s = [worker.step_s for worker in service.workers.values()]
    return Served(report_of(service), [one_s / sum(step_s) for one_s in step_s])


def measure(num_users: int, profile: Profile, length_s: float = LENGTH_S) -> Mapping[str, object]:
    drawn = draw_conversations(num_users, length_s, Random(num_users))
    arms = {
        "one": serve(drawn.trace, 1, profile),
        "four": serve(drawn.trace, NUM_REPLICAS, profile),
        "four_unaware": serve(drawn.trace, NUM_REPLICAS, profile, UnawareService),
    }
    hits = {name: arm.report.cached_share for name, arm in arms.items()}
    return {
        "num_users": num_users,
        "ideal_share": drawn.ideal_share,
        **{name: arm.figures for name, arm in arms.items()},
        "four_over_one": hits["four"] / hits["one"],
        "four_unaware_over_one": hits["four_unaware"] / hits["one"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--live", action="store_true", help="also measure a service on this machine's CPU")
    options = parser.parse_args()
    profile = Profile.load("h200")
    loads = [measure(num_users, profile) for num_users in USERS]
    ratio = loads[0]["four_over_one"]
    assert isinstance(ratio, float)
    rows = [Row("prefix hits with four replicas over one, simulated", "ratio", ratio, aim=f">= {AIM}")]
    live = measure_service(NUM_REPLICAS) if options.live else None
    if live is not None:
        ratio = live["several_over_one"]
        assert isinstance(ratio, float)
        rows.append(Row("prefix hits with four replicas over one, live", "ratio", ratio, aim=f">= {AIM}"))
    setting = {
        "shape": SHAPE,
        "memory_bytes": MEMORY_BYTES,
        "context": CONTEXT,
        "length_s": LENGTH_S,
        "max_turns": MAX_TURNS,
        "think_s": THINK_S,
    }
    result = {"setting": setting, "rows": [asdict(row) for row in rows], "loads": loads, "live": live}
    emit("prefix_routing", result, save=options.save)


if __name__ == "__main__":
    main()
