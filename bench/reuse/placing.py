"""The cost of finding a place for a model: bytes moved by each way of packing, and mapping of pages.

Moves are those of the sequences that `bench/reuse/curve.py` ran; no other is run for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from bench.report import Row, percentiles, step
from bench.reuse.curve import Curve
from bench.reuse.models import Library, LibraryModel
from bench.reuse.replay import ReplayTerms, make_room, map_ahead_of, synchronize
from bench.reuse.setting import Aim, Part, Setting
from hearth.core.types import ModelId
from hearth.memory.pool import Pool, Space
from hearth.models.layout import ByteRange
from hearth.store.transfer.destination import LoadPiece, whole
from hearth.store.transfer.transfer import Loader

MAX_MAPPING = 1.02
PACKERS = ("mapped", "arena", "merge_all")


def placing(setting: Setting, curve: Curve) -> Part:
    moved = {arm: sum(point.arms[arm].moved_bytes for point in curve.points) for arm in PACKERS}
    moves_s = {arm: sum(point.arms[arm].moves_s for point in curve.points) for arm in PACKERS}
    place_s = {arm: sum(point.arms[arm].place_s for point in curve.points) for arm in PACKERS}
    with step("placing: mapping"):
        mapping = measure_mapping(setting)
    figures = {kind: percentiles(times) for kind, times in asdict(mapping).items()}
    ratio = figures["fresh_s"]["p50"] / figures["again_s"]["p50"]
    names = {"mapped": "mapped pages", "arena": "arena, packing", "merge_all": "arena, merging all"}
    rows = [Row(f"moved to make place: {names[arm]}", "GB", moved[arm] / 1e9) for arm in PACKERS]
    rows.append(
        Row("load with mapping over load into memory mapped before", "ratio", ratio, 1.0, f"{MAX_MAPPING:g}")
    )
    aims = [
        Aim.most("bytes moved with mapped pages", moved["mapped"], 0),
        Aim.most("load with mapping over load into memory mapped before", ratio, MAX_MAPPING),
    ]
    saved = {
        "bytes": 1 - moved["arena"] / max(1, moved["merge_all"]),
        "seconds": 1 - moves_s["arena"] / (moves_s["merge_all"] or 1.0),
    }
    details = {
        "moved_bytes": moved,
        "moves_s": moves_s,
        "place_s": place_s,
        "packing_saves_of_merging_all": saved,
        "mapping": figures,
    }
    return Part(rows, aims, details)


@dataclass(frozen=True, slots=True)
class MappingTimes:
    """Seconds that loads of a whole model took, by how its pages were mapped."""

    fresh_s: list[float]  #: into pages that were another model's, mapped chunk by chunk
    again_s: list[float]  #: the same chunks once more, into the same pages
    plain_s: list[float]  #: the same into memory that torch has


def measure_mapping(setting: Setting) -> MappingTimes:
    """Let two models take turns in memory for one, so that every page is unmapped and mapped."""
    mapping, terms = MappingTimes([], [], []), ReplayTerms()
    arch = setting.scale.whole_arch
    with setting.library({"one": arch, "other": arch}) as shelf:
        room_bytes = setting.scale.workspace_bytes + setting.scale.max_kv_bytes
        num_pages = -(-(shelf.models[0].manifest.num_bytes + room_bytes) // setting.scale.chunk_bytes) + 2
        with setting.pool("mapped", num_pages * setting.scale.chunk_bytes, terms) as pool:
            for turn in range(setting.scale.num_repeats + 1):
                _take_turn(setting, shelf, pool, terms, mapping, shelf.models[turn % 2])
    for times in (mapping.fresh_s, mapping.again_s, mapping.plain_s):
        del times[0]  # it had no other to take pages from
    return mapping


def _take_turn(
    setting: Setting,
    shelf: Library,
    pool: Pool,
    terms: ReplayTerms,
    mapping: MappingTimes,
    model: LibraryModel,
) -> None:
    terms.running = model.id
    make_room(pool, model)
    space = pool.place(model.id, model.shape)
    pool.prepare_rest(model.id)
    pieces = [LoadPiece.to(gap.part, gap.destination) for gap in space.gaps]
    terms.is_loading = True
    for times in (mapping.fresh_s, mapping.again_s):
        begin = partial(_prepare, pool, model.id, space, setting.loader)
        times.append(_load_s(setting, shelf, model, pieces, begin))
    terms.is_loading = False
    pool.load_ended(model.id, is_whole=True)
    pool.retire(model.id)
    base = torch.empty(model.manifest.num_bytes, dtype=torch.uint8, device=setting.device)
    mapping.plain_s.append(_load_s(setting, shelf, model, whole(model.manifest, base), lambda: _nothing))


def _load_s(
    setting: Setting,
    shelf: Library,
    model: LibraryModel,
    pieces: Sequence[LoadPiece],
    begin: Callable[[], Callable[[ByteRange], None]],
) -> float:
    """Return the seconds of a load; `begin` starts to prepare, and says how to wait for it."""
    synchronize(setting.device)
    began_s = time.perf_counter()
    prepare = begin()
    setting.loader.load(
        model.id, model.manifest, pieces, lambda chunks: shelf.stream(model, chunks, prepare)
    ).wait()
    return time.perf_counter() - began_s


def _prepare(pool: Pool, model: ModelId, space: Space, loader: Loader) -> Callable[[ByteRange], None]:
    return map_ahead_of(pool, model, space, loader).wait_for


def _nothing(part: ByteRange) -> None:
    pass
