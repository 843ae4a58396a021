"""How close is loading to the limits of the media, and to the peers? A random Llama-2-7B in bf16, 13.5 GB.

python -m bench.load [--save] [--only PART ...] [--quick] [--keep]

    convert       seconds and memory of the converter, from disk to disk
    host          host tier to device; what it costs to start the tier
    first_token   a cold model to its first token, from the host tier
    disk          disk, caches dropped, to device; against raw reads and peers on the same weights
    tmpfs         files in memory to device; against peers
    quantised     int8 and fp8: host tier to device, decode at batch 1

Hearth verifies every byte it reads, the peers verify none. Contestants take turns, each round begins with
another one; from tmpfs the first run of each does not count. The models need 27 GB of disk and 41 GB of
/dev/shm; they are removed at the end.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from bench.load.parts import PARTS, measure
from bench.load.peers import Started, started
from bench.load.setting import QUICK, Scale, Setting, flags, shelved
from bench.report import emit, peers

WITH_PEERS = {"disk", "tmpfs"}


def main() -> None:
    command = flags(__doc__)
    command.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    options = command.parse_args()
    scale = QUICK if options.quick else Scale()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    figures = {} if options.quick else peers()["load"]["peers"]  # type: ignore[index] # JSON
    with_peers = started(str(device)) if WITH_PEERS & set(options.only) else nullcontext(Started({}, {}, {}))
    with shelved(scale, options) as shelf, with_peers as running:
        setting = Setting(scale, shelf, device, running, figures)
        result = measure(setting, options.only)
    emit("load", {"is_quick": options.quick, **result}, save=options.save)


if __name__ == "__main__":
    main()
