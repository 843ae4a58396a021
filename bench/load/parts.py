"""The questions of `bench.load`: conversion, host tier, disk, files in memory. Parses no flags."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.load.contest import contest
from bench.load.engine import first_token, quantised
from bench.load.raw_readers import Caches, fastest_readers, pinned
from bench.load.setting import Part, Setting
from bench.report import Row, percentiles, step
from hearth.store.format.local_hashes import forget_hashes
from hearth.store.format.manifest import WEIGHTS, read_manifest

NUM_RAW_READERS = 1  #: the fastest run beside the contestants


def convert(setting: Setting) -> Part:
    with step("convert: the checkpoint"):
        setting.shelf.checkpoint_on_disk(setting.device)
        os.sync()  # else the disk is still busy with it
    with step("convert"):
        conversion = setting.shelf.convert(setting.device)
    rows = [
        Row("convert, disk to disk", "s", conversion.seconds),
        Row("peak memory of the converter", "GB", conversion.peak_bytes / 1e9),
    ]
    return Part(rows, asdict(conversion))


def host(setting: Setting) -> Part:
    directory = setting.shelf.model(setting.device)
    bound_s = setting.bound_s(read_manifest(directory).num_bytes)
    host_bytes = setting.scale.host_bytes
    setting.register(directory)
    with step("host: pinning"):
        began_s = time.perf_counter()
        with setting.tiers(host_bytes):
            pin_s = time.perf_counter() - began_s
    with step("host"), setting.tiers(host_bytes, is_pinned=False) as tiers:
        first = setting.open_and_load(tiers, directory)
        tiers.segment.wait_pinned()
        times = percentiles(setting.reload_s(tiers, directory))
    rows = [
        Row("host tier to device", "s", times["p50"], bound_s, "at most 1.05 times the bound"),
        Row("start of the host tier: memory pinned", "GB/s", host_bytes / pin_s / 1e9),
        Row("first load, from tmpfs, while the tier is being pinned", "s", first.seconds),
    ]
    return Part(rows, {"seconds": times, "pin_s": pin_s, "first_load": asdict(first)})


def disk(setting: Setting) -> Part:
    with pinned(setting.scale.pinned_bytes) as buffer:
        return _disk(setting, buffer.memory(0, setting.scale.pinned_bytes))


def _disk(setting: Setting, target: memoryview) -> Part:
    """Measure reads from the disk; those that are raw go to `target`."""
    checkpoint = setting.shelf.checkpoint_on_disk(setting.device)
    directory = setting.shelf.model_on_disk(setting.device)
    weights = directory / WEIGHTS
    setting.register(directory)
    files = [weights, *checkpoint.glob("*.safetensors")]
    caches = Caches.of(*files, is_machine_ours=setting.scale.is_machine_ours)
    with step("disk: raw readers"):
        rates = fastest_readers(weights, target, setting.scale.survey_bytes, caches)
    num_bytes = weights.stat().st_size
    fastest = list(rates)[:NUM_RAW_READERS]
    raw = {str(reader): partial(reader.read_s, weights, target, num_bytes) for reader in fastest}
    with step("disk"):
        result = contest(
            *(setting, directory, checkpoint, raw, caches.drop), num_rounds=setting.scale.num_runs
        )
    figures = result.peer_figures(setting, "disk")
    measured = [percentiles(times)["p50"] for name, times in result.times.items() if name != "Hearth"]
    seconds = percentiles(result.times["Hearth"])["p50"]
    aim = "at most 1.05 times the best of raw readers and peers"
    row = Row("disk, caches dropped, to device", "s", seconds, min(measured), aim, figures)
    details = {
        **result.details(),
        "raw_bytes_per_s": {str(reader): rate for reader, rate in rates.items()},
        "is_every_cache_dropped": caches.is_everything_dropped,
    }
    return Part([row], details)


def tmpfs(setting: Setting) -> Part:
    checkpoint, directory = setting.shelf.checkpoint(setting.device), setting.shelf.model(setting.device)
    with step("tmpfs: checking digests"):
        register_s = setting.register(directory)
    with step("tmpfs"):
        num_rounds = 1 + setting.scale.num_fast_runs
        result = contest(
            *(setting, directory, checkpoint, {}, lambda: None), num_rounds=num_rounds, num_warm_up=1
        )
    with step("tmpfs: not checked before"):
        unknown_s = [_load_unknown_s(setting, directory) for _ in range(setting.scale.num_runs)]
    seconds = percentiles(result.times["Hearth"])["p50"]
    num_bytes = read_manifest(directory).num_bytes
    bound_s = setting.bound_s(num_bytes)
    figures = result.peer_figures(setting, "tmpfs")
    rows = [
        Row("tmpfs to device", "s", seconds, bound_s, "faster than every peer", figures),
        Row("tmpfs to device, checked by BLAKE3", "s", percentiles(unknown_s)["p50"], bound_s),
        Row("registering a directory: BLAKE3 of all bytes in tmpfs", "GB/s", num_bytes / register_s / 1e9),
    ]
    details = {"unknown_seconds": percentiles(unknown_s), "register_s": register_s}
    return Part(rows, {**result.details(), **details})


def _load_unknown_s(setting: Setting, directory: Path) -> float:
    """Return the time of a load of files that this machine has never checked."""
    forget_hashes(setting.store, directory.resolve())
    with setting.tiers(setting.scale.ring_bytes) as tiers:
        return setting.open_and_load(tiers, directory).seconds


PARTS: dict[str, Callable[[Setting], Part]] = {
    "convert": convert,
    "host": host,
    "first_token": first_token,
    "disk": disk,
    "tmpfs": tmpfs,
    "quantised": quantised,
}


def measure(setting: Setting, names: list[str]) -> dict[str, object]:
    with step("rate to the device"):
        bytes_per_s = setting.bytes_per_s
    rows, details = [], {}
    for name in names:
        part = PARTS[name](setting)
        rows += [asdict(row) for row in part.rows]
        details[name] = part.details
        for row in part.rows:  # so that a run that is cut off has not been for nothing
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        print(json.dumps({name: part.details}), file=sys.stderr, flush=True)
    return {"to_device_bytes_per_s": bytes_per_s, "rows": rows, "results": details}
