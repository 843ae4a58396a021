"""How fast do weights and tokens go between machines, and how soon does a machine join or get replaced?

python -m bench.cluster [--save] [--parts PART ...] [--rounds N]

    loopback    keepers in processes of their own on this machine, host memory to host memory, plain and
                encrypted; two senders for one receiver; with chunks kept on the receiver's disk
    shaped      each in a network namespace, behind links of 200 Mbit/s (needs root and `tc`)
    join        from the start of `hearth join` to the first token of a model there, its files on the node's
                disk or fetched from the head
    lost        a node is killed or stopped: from then to the next token of a stream that ran there
    source      a stream of a node's worker while the node sends a model, with and without a link of
                200 Mbit/s (needs root and `tc`; not under `nice`)
    burst       four cold nodes and 32 requests within a second, links of 100 Mbit/s; compared with nodes that
                each read the model at a tenth of that, as from disks (needs root and `tc`)
    tokens      32 streams through a worker of a node, in turns with the head's own worker

Models have random weights, each its own. `loopback` and `shaped` probe the ceiling before every round: as
many sockets between two processes, sent from a memory file and hashed on arrival. The other parts run a head
and a node with CPU workers on this machine. The medians of all rounds are reported.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from statistics import median

from bench.cluster.burst import burst
from bench.cluster.parts import Figure, loopback, shaped
from bench.cluster.serving import join, lost, tokens
from bench.cluster.source import source
from bench.report import Row, arguments, emit

PARTS: Mapping[str, Callable[[int], Iterator[Figure]]] = {
    "loopback": loopback,
    "shaped": shaped,
    "join": join,
    "lost": lost,
    "source": source,
    "burst": burst,
    "tokens": tokens,
}
NUM_ROUNDS: Mapping[str, int] = {
    "loopback": 5,
    "shaped": 5,
    "join": 3,
    "lost": 3,
    "source": 3,
    "burst": 3,
    "tokens": 5,
}


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("--parts", nargs="+", choices=list(PARTS), default=["loopback"], metavar="PART")
    command.add_argument("--rounds", type=int, help="by default 5; 3 of `join`, `lost`, `source` and `burst`")
    options = command.parse_args()
    rows: list[Row] = []
    rounds: dict[str, list[float]] = {}
    for part in options.parts:
        for figure in PARTS[part](options.rounds or NUM_ROUNDS[part]):
            bound = median(figure.bounds) if figure.bounds else None
            rows.append(Row(figure.measure, figure.unit, median(figure.values), bound, figure.aim))
            rounds[figure.measure] = figure.values
    emit("cluster", {"rows": [asdict(row) for row in rows], "rounds": rounds}, save=options.save)


if __name__ == "__main__":
    main()
