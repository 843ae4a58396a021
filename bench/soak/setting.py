"""How a service is set up whose models do not all fit: limits, the shape of its models, and its budget."""

from __future__ import annotations

from bench.random_model import TINY
from hearth.control.datadir import DataDir
from hearth.control.deploy.registry import Registry
from hearth.core.sizes import StepLimits
from hearth.policy.fleet.footprint import footprint

NUM_WORKERS = 2
NUM_FITTING = 3  #: models in the budget of a worker
LIMITS = StepLimits(max_batch_tokens=512, max_seqs=16, block_tokens=16)
CONFIG = {**TINY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def flags(data_dir: DataDir) -> list[str]:
    """Return the flags of `hearth serve` for workers with room for a few of the models in the directory."""
    engine = {"max_batch_tokens": LIMITS.max_batch_tokens, "max_seqs": LIMITS.max_seqs}
    settings = [part for key, value in engine.items() for part in ("--set", f"engine.{key}={value}")]
    sizes = ["--memory", str(budget_bytes(data_dir)), "--host-memory", "64MiB"]
    return ["--device", "cpu", "--workers", str(NUM_WORKERS), *sizes, *settings]


def budget_bytes(data_dir: DataDir) -> int:
    """Return a budget for so many models with all KV they may have, or hardly less than one more needs."""
    with Registry(data_dir) as registry:
        facts = [deployed.facts for deployed in registry.all()]
    sizes = [footprint(fact, "cpu", LIMITS) for fact in facts]
    most = NUM_FITTING * max(size.fixed_bytes + size.max_kv_bytes for size in sizes)
    room = min(most, (NUM_FITTING + 1) * min(size.least_bytes for size in sizes) - 1)
    assert room >= NUM_FITTING * max(size.least_bytes for size in sizes), f"{room=} {sizes=}"
    return room
