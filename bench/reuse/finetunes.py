"""Two fine-tunes of one model: what the second one costs beside a full copy. Trains nothing.

The second is the first with other bytes in the chunks of some neighbouring layers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.report import Row, percentiles, step
from bench.reuse.models import LibraryModel
from bench.reuse.replay import Replay, ReplayTerms, check_bytes, make_room, num_missing, synchronize
from bench.reuse.setting import Aim, Part, Setting
from hearth.memory.pool import Space
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import Manifest

#: Of the chunks of the second one, those that only it has.
CHANGED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    memory_bytes: int  #: of weights and the first page of KV
    load_bytes: int
    load_s: float
    space: Space


def finetunes(setting: Setting) -> Part:
    arch = setting.scale.whole_arch
    terms = ReplayTerms()
    with setting.library({"base": arch}, spare_chunks=setting.scale.max_changed_chunks) as shelf:
        base = shelf.models[0]
        changed = changed_chunks(base.manifest)
        tuned = shelf.add_changed("tuned", base, changed)
        page_bytes, room_bytes = setting.scale.chunk_bytes, setting.scale.workspace_bytes
        num_pages = 2 * len(base.cells) + -(-room_bytes // page_bytes) + 8
        with setting.pool("mapped", num_pages * page_bytes, terms) as pool, step("fine-tunes"):
            replay = Replay(pool, terms, shelf, setting.loader)
            full = [_cost(replay, tuned) for _ in range(setting.scale.num_repeats + 1)][1:]
            pool.drop(tuned.id)
            first = _cost(replay, base)
            second = [_cost(replay, tuned) for _ in range(setting.scale.num_repeats)]
            check_bytes(shelf, tuned, second[-1].space)
            check_bytes(shelf, base, first.space)
            shared_bytes = {one.model: one.shared_bytes for one in pool.usage().holdings}[tuned.id]
    full_s, second_s = (percentiles([cost.load_s for cost in costs]) for costs in (full, second))
    memory = second[-1].memory_bytes / full[-1].memory_bytes
    seconds = second_s["p50"] / full_s["p50"]
    name = f"second of two fine-tunes that share {1 - len(changed) / len(base.cells):.1%} of their chunks"
    rows = [
        Row(f"{name}: memory over a full copy's", "ratio", memory, aim=f"{CHANGED_SHARE:g}"),
        Row(f"{name}: load time over a full copy's", "ratio", seconds, aim=f"{CHANGED_SHARE:g}"),
    ]
    aims = [
        Aim.most("second fine-tune: memory over a full copy's", memory, CHANGED_SHARE),
        Aim.most("second fine-tune: load time over a full copy's", seconds, CHANGED_SHARE),
    ]
    details = {
        "num_chunks": len(base.cells),
        "num_changed_chunks": len(changed),
        "full": {"memory_bytes": full[-1].memory_bytes, "load_bytes": full[-1].load_bytes, "load_s": full_s},
        "second": {
            "memory_bytes": second[-1].memory_bytes,
            "load_bytes": second[-1].load_bytes,
            "load_s": second_s,
            "shared_bytes": shared_bytes,
        },
    }
    return Part(rows, aims, details)


def changed_chunks(manifest: Manifest) -> range:
    """Return the chunks of neighbouring layers, as many as the share allows, but at least of one."""
    layers, most = manifest.layers, CHANGED_SHARE * len(manifest.chunks)
    first = len(layers) // 2
    chunks = manifest.chunks_of(layers[first])
    for layer in layers[first + 1 :]:
        more = manifest.chunks_of(ByteRange(layers[first].begin, layer.end))
        if len(more) > most:
            break
        chunks = more
    return chunks


def _cost(replay: Replay, model: LibraryModel) -> Cost:
    """Measure what it costs to have a model that is not there."""
    pool, terms = replay.pool, replay.terms
    pool.drop(model.id)
    free_bytes = pool.usage().free_bytes + pool.usage().workspace_bytes
    terms.running = model.id
    synchronize(replay.loader.device)
    began_s = time.perf_counter()
    make_room(pool, model)
    space = pool.place(model.id, model.shape)
    pool.prepare_rest(model.id)
    replay.load(model, space)
    load_s = time.perf_counter() - began_s
    usage = pool.usage()
    terms.running = None
    taken_bytes = free_bytes - usage.free_bytes - usage.workspace_bytes
    return Cost(taken_bytes, num_missing(space), load_s, space)
