"""How fast do chunks go from the store of a node to that of another, beside what sockets and hashing allow?

python -m bench.cluster [--save] [--parts PART ...] [--rounds N]

    loopback    keepers in processes of their own on this machine, host memory to host memory, plain and
                encrypted; two senders for one receiver; with chunks kept on the receiver's disk
    shaped      each in a network namespace, behind links of 200 Mbit/s (needs root and `tc`)

Models have random weights, each its own. In every round the ceiling is probed first: as many sockets between
two processes, sent from a memory file and hashed on arrival. The medians of all rounds are reported.
"""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

from bench.cluster.parts import PARTS
from bench.report import Row, arguments, emit

NUM_ROUNDS = 5


def main() -> None:
    command = arguments(__doc__)
    command.add_argument("--parts", nargs="+", choices=list(PARTS), default=["loopback"], metavar="PART")
    command.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = command.parse_args()
    rows: list[Row] = []
    rounds: dict[str, list[float]] = {}
    for part in options.parts:
        for figure in PARTS[part](options.rounds):
            bound = median(figure.bounds) if figure.bounds else None
            rows.append(Row(figure.measure, figure.unit, median(figure.values), bound, figure.aim))
            rounds[figure.measure] = figure.values
    emit("cluster", {"rows": [asdict(row) for row in rows], "rounds": rounds}, save=options.save)


if __name__ == "__main__":
    main()
