"""What is a model worth that is still there in part? Switches between models on one device, with and without.

python -m bench.reuse [--save] [--part PART ...] [--tiny] [--device cpu]

    workloads   Tangram's L1-L4 with eight models, all 2.7 and 4.4 times the budget: load time with reuse,
                on mapped pages and on two arenas, over load time without, beside the bound
    placing     bytes moved to make place, mapped pages beside packing beside merging all; what mapping costs
    switch      first token of a 7B of which 100, 75, 50, 25 or 0% is still there, through a worker
    finetunes   the second of two models that share nine tenths of their chunks, beside a full copy

With `--save` parts that are not run stay in the result as they were; each says when and on what it was
measured. `--tiny` is to see that everything runs, and its numbers mean nothing: a few requests on a device,
and on a CPU small models as well. The models of `workloads` take 54 GB of host memory, and up to 60 GB of the
device, in three pools side by side; those of `switch` 27 GB in /dev/shm and as much again.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter

import torch

from bench.report import HERE, arguments, emit, peers
from bench.reuse.parts import PARTS, describe, device_pages, document, host_pages, measure
from bench.reuse.setting import SHORT, TINY, NewPages, Scale, Setting
from hearth.store.transfer.transfer import Loader


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="see only that everything runs")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU has no memory for this: add --tiny")
    if options.tiny and options.save:
        parser.error("numbers of a tiny run mean nothing: leave out --save")
    is_cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    new_pages: NewPages = device_pages if is_cuda else host_pages
    scale = Scale() if not options.tiny else SHORT if is_cuda else TINY
    published = peers()["reuse"]["peers"]  # type: ignore[index] # JSON
    setting = Setting(scale, device, Loader(device), new_pages, published)
    parts = measure(setting, options.part)
    # Numbers of a tiny run mean nothing, so they never stand beside others.
    earlier = HERE / "results" / ("reuse.json" if options.save else "nothing")
    result = {"is_tiny": options.tiny, "setting": describe(setting), **document(parts, earlier)}
    emit("reuse", result, save=options.save)


if __name__ == "__main__":
    main()
