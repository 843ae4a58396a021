"""How long does everything take that happens before the first token? A service, a worker, a model.

python -m bench.coldstart [--save] [--only PART ...] [--host-bytes N] [--tiny] [--place DIR]

    ready    `hearth serve` until a worker can host models, by parts: imports, fork, context, memory, ...
    first    the first request of a service that has just started, its model in files, host memory not pinned
    kill     the worker dies in the middle of a stream: the pause, and how long its process takes to end
    model    a start from host memory, the first in its process, to the first token, against bytes / bandwidth

Random Llama-2-7B, Qwen-1.5-4B and 0.5B in bf16. All caches are warm: one service has served each before.
`--tiny` does the same with small models on the CPU, to see that everything runs; its numbers mean nothing.
The models need up to 37 GB in /dev/shm, the host tier takes `--host-bytes` besides.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

from bench.coldstart.parts import PARTS
from bench.coldstart.setting import TINY, Scale, Setting
from bench.report import arguments, emit, tell


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--host-bytes", type=int, help="of the host tier; 41e9 if not given")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are made")
    options = parser.parse_args()
    scale = TINY if options.tiny else Scale()
    if options.host_bytes is not None:
        scale = replace(scale, host_bytes=options.host_bytes)
    place = Path(tempfile.mkdtemp(prefix="hearth-bench-", dir=options.place))
    parts = {}
    try:
        setting = Setting(scale, place)
        for name in options.only:
            parts[name] = PARTS[name](setting)
            for line in parts[name].rows:  # so that a run that is cut off has not been for nothing
                tell(f"{name}: {line['measure']}: {line['value']} {line['unit']}, bound {line['bound']}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    rows = [line for part in parts.values() for line in part.rows]
    results = {name: part.details for name, part in parts.items()}
    result = {"is_tiny": options.tiny, "host_bytes": scale.host_bytes, "rows": rows, "results": results}
    emit("coldstart", result, save=options.save)


if __name__ == "__main__":
    main()
