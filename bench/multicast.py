"""How soon do several nodes have a model that only one has?

python -m bench.multicast [--save] [--nodes N ...] [--rounds N]

Keepers in network namespaces, one per node, behind links of 100 Mbit/s (needs root and `tc`). All receivers
begin at once. The same bytes go by the binomial pipeline, down a tree, along a chain, from the source to one
node after the other, and as nodes fetch them without a plan. The bound of N nodes and b parts is
b + ceil(log2 N) - 1 times a part, as fast as one comes from one node to another in the same round.

Of 8 nodes, two and four have the model, too, and send it in k groups. Reported is when one receiver of each
group together first hold the model: the bound is ceil(b / k) + ceil(log2 L) - 1 times a part, with L nodes in
the largest group. Weights are random, other ones for each run. The medians of all rounds are reported.
"""

from __future__ import annotations

import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median

from bench.cluster import parts
from bench.cluster.netlab import shaped_links
from bench.cluster.nodes import Cluster
from bench.cluster.parts import Figure, Keeper, start_keeper, warm_up, write_random
from bench.cluster.schedules import chain, one_by_one, tree
from bench.report import Row, arguments, emit, tell
from hearth.core.node_messages import PlannedFetch
from hearth.core.types import NodeId
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.policy.multicast.schedules import Schedule, multicast
from hearth.store.format.manifest import CHUNK_BYTES as CELL_BYTES
from hearth.store.format.manifest import Manifest
from hearth.store.transfer.lease_client import LeaseClient

MBIT = 100
CHUNK_BYTES = 4 << 20
#: 64 MB in bfloat16: 16 chunks, each a part.
SHAPE: Mapping[str, object] = {
    **parts.SHAPE,
    "hidden_size": 512,
    "intermediate_size": 832,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
NUM_BYTES = layout_of(arch_from_config(dict(SHAPE)), "bfloat16").num_bytes
NUM_PARTS = -(-NUM_BYTES // CHUNK_BYTES)
HOST_BYTES = 2 * NUM_PARTS * CELL_BYTES


def binomial_pipeline(num_nodes: int, num_parts: int) -> Schedule:
    return multicast(1, num_nodes - 1, num_parts)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule] | None] = {
    "binomial pipeline": binomial_pipeline,
    "tree": tree,
    "chain": chain,
    "one by one": one_by_one,
    "no plan": None,
}


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8], help="with the source")
    command.add_argument("--sources", type=int, nargs="*", default=[2, 4], help="beside those with one")
    command.add_argument("--rounds", type=int, default=3)
    options = command.parse_args()
    rows: list[Row] = []
    rounds: dict[str, list[float]] = {}
    for figure in measure(options.nodes, options.sources, options.rounds):
        rows.append(
            Row(figure.measure, figure.unit, median(figure.values), median(figure.bounds), figure.aim)
        )
        rounds[figure.measure] = figure.values
    emit("multicast", {"rows": [asdict(row) for row in rows], "rounds": rounds}, save=options.save)


def measure(numbers: Sequence[int], sources: Sequence[int], num_rounds: int) -> Iterator[Figure]:
    names = [f"m{index}" for index in range(max(numbers))]
    figures: dict[tuple[int, str], Figure] = {}
    with shaped_links(dict.fromkeys(names, MBIT)) as addresses, lab(addresses) as (cluster, keepers):
        for number in range(num_rounds):
            copy_s = spread(cluster, keepers[:2], binomial_pipeline)
            for num_nodes in numbers:
                for how, schedule in SCHEDULES.items():
                    seconds = spread(cluster, keepers[:num_nodes], schedule)
                    aim = "at most 1.1 times the bound" if schedule is binomial_pipeline else None
                    figure = figures.setdefault(
                        (num_nodes, how), Figure(f"1 -> {num_nodes - 1} nodes, {how}", "s", aim)
                    )
                    figure.values.append(seconds)
                    figure.bounds.append(copy_s * (1 + ((num_nodes - 1).bit_length() - 1) / NUM_PARTS))
                    tell(f"round {number}: {figure.measure}: {seconds:.2f} s, bound {figure.bounds[-1]:.2f}")
            for num_sources in sources:
                what = f"{num_sources} -> {len(keepers) - num_sources} nodes, first to hold it together"
                figure = figures.setdefault(
                    (num_sources, "together"), Figure(what, "s", "at most 1.1 times the bound")
                )
                figure.values.append(hold_together(cluster, keepers, num_sources))
                num_rounds_each = (
                    -(-NUM_PARTS // num_sources) + (-(-len(keepers) // num_sources) - 1).bit_length() - 1
                )
                figure.bounds.append(copy_s * num_rounds_each / NUM_PARTS)
                tell(f"round {number}: {what}: {figure.values[-1]:.2f} s, bound {figure.bounds[-1]:.2f}")
    yield from figures.values()


@contextmanager
def lab(addresses: Mapping[str, str]) -> Iterator[tuple[Cluster, list[Keeper]]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-"))
        cluster = stack.enter_context(closing(Cluster(Path(folder))))
        yield (
            cluster,
            [
                start_keeper(cluster, name, stack, host_bytes=HOST_BYTES, disk_bytes=0, address=address)
                for name, address in addresses.items()
            ],
        )


def spread(
    cluster: Cluster, keepers: Sequence[Keeper], make_schedule: Callable[[int, int], Schedule] | None
) -> float:
    """Have all but the first keeper load a new model at once; return how long the last one takes."""
    schedule = None if make_schedule is None else make_schedule(len(keepers), NUM_PARTS)
    manifest = prepare(cluster, keepers, 1, schedule)
    with ThreadPoolExecutor(len(keepers)) as threads:
        return max(threads.map(lambda keeper: load(keeper, manifest), keepers[1:]))


def hold_together(cluster: Cluster, keepers: Sequence[Keeper], num_sources: int) -> float:
    """Have all keepers but some load a new model; return when one of each group together hold all of it."""
    schedule = multicast(num_sources, len(keepers) - num_sources, NUM_PARTS)
    manifest = prepare(cluster, keepers, num_sources, schedule)
    receivers = keepers[num_sources:]
    with ThreadPoolExecutor(len(receivers)) as threads:
        came_s = dict(
            zip(
                range(num_sources, len(keepers)),
                threads.map(lambda keeper: arrivals(keeper, manifest), receivers),
                strict=True,
            )
        )

    def together_s(nodes: Sequence[int]) -> float:
        return max(min(came_s[node][part] for node in nodes) for part in range(NUM_PARTS))

    return min(together_s(nodes) for nodes in product(*(group[1:] for group in schedule.groups)))


def arrivals(keeper: Keeper, manifest: Manifest) -> list[float]:
    """Load a model; return when each of its chunks came, in seconds since the beginning."""
    began_s, chunks = time.perf_counter(), range(len(manifest.chunks))

    def await_chunk(index: int) -> float:
        load(keeper, manifest, [index])
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(len(chunks)) as threads:
        return list(threads.map(await_chunk, chunks))


def prepare(
    cluster: Cluster, keepers: Sequence[Keeper], num_sources: int, schedule: Schedule | None
) -> Manifest:
    """Write a new model, which the first keepers have in memory, and tell the others the schedule."""
    directory, manifest = write_random(cluster.folder / f"model-{time.monotonic_ns()}", SHAPE, CHUNK_BYTES)
    for keeper in keepers[:num_sources]:
        warm_up(keeper, directory)
    names, plans = [keeper.node.name for keeper in keepers], defaultdict[NodeId, list[PlannedFetch]](list)
    for turn, send in enumerate(() if schedule is None else schedule.sends):
        fetch = PlannedFetch(send.part, send.part + 1, names[send.source], turn)
        plans[names[send.target]].append(fetch)
    cluster.plans = {name: tuple(plan) for name, plan in plans.items()}
    return manifest


def load(keeper: Keeper, manifest: Manifest, chunks: Sequence[int] | None = None) -> float:
    """Load a model, or some chunks of it; return how long that takes."""
    began_s = time.perf_counter()
    with closing(LeaseClient(keeper.socket, is_pinned=False)) as client:
        model = client.open(f"hearth://{manifest.digest}")
        grant = client.grant(model, range(len(manifest.chunks)) if chunks is None else chunks)
        for chunk in grant:
            grant.release(chunk)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
