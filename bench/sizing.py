"""How long `hearth simulate --find` takes for 250,000 requests, and what its sample costs in accuracy.

    python -m bench.sizing [--only large poisson gamma arena] [--save]

Each of the smaller workloads is sized twice: by a sample, and by all of its requests. The time of the largest
is that of its command and all its processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.report import HERE, Row, arguments, emit, tell

LENGTHS = ("--lengths", str(HERE / "data" / "azure_llm" / "conv.csv.gz"))
ARENA = str(HERE / "data" / "lmsys_arena" / "requests.csv")
HOST = ("--host-memory", "1TiB")  #: so that only devices are searched
#: By name: the workload, and how many of its requests are simulated at a time.
WORKLOADS = {
    "large": (("poisson:70", "--length", "3600", "--models", "7b*40", *LENGTHS), None),
    "poisson": (("poisson:4", "--length", "300", "--models", "7b*20", *LENGTHS, *HOST), 300),
    "gamma": (("gamma:3:4", "--length", "400", "--models", "13b*6,7b*6", *LENGTHS, *HOST), 300),
    "arena": ((ARENA, "--length", "300", "--models", "7b*27", *HOST), 300),
}
#: Of a command, as JSON.
Answer = dict[str, Any]
ALL = "all requests"


def find(words: tuple[str, ...], max_requests: int | None) -> Answer:
    """Return the answer of the command, and the seconds it took."""
    limit = () if max_requests is None else ("--sample", str(max_requests))
    begin_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "hearth", "simulate", *words, *limit, "--find", "--json"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, use = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{words}: {process.returncode=}"
    wall_s = time.perf_counter() - begin_s
    return {**json.loads(out), "wall_s": wall_s, "cpu_s": use.ru_utime + use.ru_stime}


def rows_of(name: str, sampled: Answer, whole: Answer | None) -> Iterator[Row]:
    measure = f"{name}: {sampled['num_requests']:,} requests"
    if whole is None:
        yield Row(f"{measure}, time", "s", sampled["wall_s"], aim="at most 600")
        yield Row(f"{measure}, time of all cores", "s", sampled["cpu_s"])
    else:
        yield Row(f"{measure}, GPUs", "", sampled["num_gpus"], peers={ALL: whole["num_gpus"]})
        yield Row(f"{measure}, time of all cores", "s", sampled["cpu_s"], peers={ALL: whole["cpu_s"]})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = parser.parse_args()
    for name in options.only:
        words, max_requests = WORKLOADS[name]
        sampled, whole = find(words, max_requests), None
        tell(f"{name}: {sampled}")
        if max_requests is not None:
            whole = find(words, 1 << 40)
            tell(f"{name}, {ALL}: {whole}")
        rows = [asdict(row) for row in rows_of(name, sampled, whole)]
        runs = [sampled] if whole is None else [sampled, whole]
        emit("sizing" if whole is None else f"sizing_{name}", {"rows": rows, "runs": runs}, save=options.save)


if __name__ == "__main__":
    main()
