"""How much of a device's memory elastic KV leaves for weights of idle models, beside reserved KV.

Its runs are watched at every step, so they say nothing about time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from bench.elastic.contest import Contest
from bench.elastic.load import Drive, Load, Mark
from bench.elastic.setting import Aim, Part, Scale
from bench.elastic.stage import Arm, blocks_for

#: By which Tangram's on-demand KV increases the space for tensors as the batch grows (its section 5.4.2).
TANGRAM_GAIN_PERCENT = (2.3, 41.0)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A look at KV and maps after one step."""

    at_s: float
    num_tokens: int  #: that came out of it
    kv_bytes: int
    num_awaited: int  #: maps that the step thread has made so far


def shares(contest: Contest, scale: Scale, device_bytes: int) -> Part:
    """Measure which share of the device is left for weights of idle models, and maps that a step awaits."""
    batches = {
        batch.num_requests: _share(contest, scale, batch.num_requests, device_bytes)
        for batch in scale.batches
    }
    contest.stage.set_up(Arm.ELASTIC)
    num_awaited = sum(share.num_awaited for share in batches.values())
    gains = [share.elastic_peak_points - share.static_context_points for share in batches.values()]
    rows: list[dict[str, object]] = [
        {
            "measure": f"memory left for idle models, batch {size}",
            "unit": "% of the device",
            "value": share.elastic_peak_points,
            "peers": {"a whole context reserved for each": share.static_context_points},
            "is_comparable": False,  # more is better here
        }
        for size, share in batches.items()
    ]
    aim = Aim("maps that a decode step waited for, all batches", num_awaited, "0", num_awaited == 0)
    details = {
        "device_bytes": device_bytes,
        "gain_points": [min(gains), max(gains)],
        "tangram_gain_percent": TANGRAM_GAIN_PERCENT,
        "batches": {size: asdict(share) for size, share in batches.items()},
    }
    return Part([aim], rows, details)


@dataclass(frozen=True, slots=True)
class Share:
    """Shares of the device that weights, workspace and KV of this model leave, in hundredths of it."""

    kv_peak_bytes: int
    kv_mean_bytes: float
    elastic_peak_points: float
    elastic_mean_points: float
    static_context_points: float  #: KV is reserved for as many whole contexts as the batch has sequences
    static_asked_points: float  #: for sequences that are as long as they will be, which nobody knows before
    static_rest_points: float  #: KV has all that is left
    num_awaited: int  #: maps that a step waited for while all requests decoded


def _share(contest: Contest, scale: Scale, num_requests: int, device_bytes: int) -> Share:
    body = contest.stage.body
    left_bytes = device_bytes - (body.budget_bytes - (1 + body.kv_blocks) * body.block_bytes)

    def points(kv_bytes: float) -> float:
        return 100 * max(0.0, left_bytes - kv_bytes) / device_bytes

    samples: list[_Sample] = []
    _sample(contest, Load.alike(num_requests, scale.prompt_tokens, scale.new_tokens), samples)
    peak_bytes, mean_bytes = max(sample.kv_bytes for sample in samples), _mean_bytes(samples)
    asked_blocks = blocks_for(num_requests, scale.seq_tokens, body.config)
    context_blocks = blocks_for(num_requests, body.max_context, body.config)
    return Share(
        kv_peak_bytes=peak_bytes,
        kv_mean_bytes=mean_bytes,
        elastic_peak_points=points(peak_bytes),
        elastic_mean_points=points(mean_bytes),
        static_context_points=points(context_blocks * body.block_bytes),
        static_asked_points=points(asked_blocks * body.block_bytes),
        static_rest_points=0.0,
        num_awaited=_awaited_while_decoding(samples, num_requests),
    )


def _sample(contest: Contest, load: Load, samples: list[_Sample]) -> None:
    """Make an elastic run and take one sample per step."""
    stage = contest.stage
    stage.set_up(Arm.ELASTIC)
    waves = contest.prompts.requests(stage.engine, load)

    def watch(mark: Mark) -> None:
        samples.append(_Sample(mark.at_s, mark.num_tokens, stage.kv_bytes, contest.maps().num_awaited))

    Drive(stage.engine, stage.step_of(Arm.ELASTIC)).run(waves, watch=watch)


def _mean_bytes(samples: Sequence[_Sample]) -> float:
    """Return the mean of KV's bytes over the time, not over the steps."""
    spans = [(later.at_s - sample.at_s, later.kv_bytes) for sample, later in pairwise(samples)]
    return sum(seconds * kv_bytes for seconds, kv_bytes in spans) / sum(seconds for seconds, _ in spans)


def _awaited_while_decoding(samples: Sequence[_Sample], num_requests: int) -> int:
    """Count awaited maps from the first to the last step that brought a token of each request."""
    full = [sample.num_awaited for sample in samples if sample.num_tokens == num_requests]
    return full[-1] - full[0]
