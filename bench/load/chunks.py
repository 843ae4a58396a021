"""How large should a chunk be? Load time of a random Llama-2-7B over chunk sizes from 4 to 64 MiB.

python -m bench.load.chunks [--save] [--quick] [--keep]

The model and the room that it needs are those of `bench.load`, whose kept models are found again.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from bench.load.peers import Started
from bench.load.setting import QUICK, Part, Scale, Setting, flags, shelved
from bench.report import Row, emit, percentiles, step
from hearth.store.format.manifest import read_manifest


def chunks(setting: Setting) -> Part:
    scale = setting.scale
    seconds: dict[str, dict[str, float]] = {}
    with step("chunks: cutting and hashing"):
        directories = {size: setting.shelf.recut(setting.device, size) for size in scale.chunk_sizes}
    rows = []
    for size, directory in directories.items():
        name = f"{size / (1 << 20):g} MiB"
        setting.register(directory)
        with step(f"chunks: {name}"), setting.tiers(scale.host_bytes, size) as tiers:
            from_tmpfs = [setting.open_and_load(tiers, directory).seconds]
            from_host = setting.reload_s(tiers, directory)
        seconds[f"{name}, host"], seconds[f"{name}, tmpfs"] = percentiles(from_host), percentiles(from_tmpfs)
        bound_s = setting.bound_s(read_manifest(directory).num_bytes)
        rows += [
            Row(f"chunks of {name}: host tier to device", "s", percentiles(from_host)["p50"], bound_s),
            Row(f"chunks of {name}: tmpfs to device", "s", percentiles(from_tmpfs)["p50"], bound_s),
        ]
    return Part(rows, {"seconds": seconds})


def main() -> None:
    options = flags(__doc__).parse_args()
    scale = QUICK if options.quick else Scale()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with shelved(scale, options) as shelf:
        setting = Setting(scale, shelf, device, Started({}, {}, {}), {})
        part = chunks(setting)
        bytes_per_s = setting.bytes_per_s
    rows = [asdict(row) for row in part.rows]
    result = {"is_quick": options.quick, "to_device_bytes_per_s": bytes_per_s, "rows": rows, **part.details}
    emit("chunks", result, save=options.save)


if __name__ == "__main__":
    main()
