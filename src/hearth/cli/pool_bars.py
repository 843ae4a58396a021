"""Draws a worker's memory map as lines of text: a bar, the owner of each stretch, and a legend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_letters, digits

from rich.text import Text

from hearth.cli.figures import duration, size
from hearth.control.observe.pool_views import fallbacks
from hearth.control.observe.views import PartView, ResidentView, WorkerView

MAX_BAR, MIN_BAR = 60, 16
MARGIN = "  "
#: A report that is older is shown with its age.
OLD_S = 2.0
#: The meanings of signs, in the order of the legend.
MEANINGS = ("weights", "retained", "KV", "tables", "adapters", "workspace", "lost", "free")
UNICODE = dict(zip(MEANINGS, "█░▒≡◆≈-·", strict=True))
ASCII = dict(zip(MEANINGS, "#=+%@~-.", strict=True))
#: The colours of models; the letters below the bar say the same.
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
#: Letters of models; of all further models; of bytes that several share; of bytes without an owner.
LETTERS, LAST, SHARED, UNOWNED = ascii_letters + digits, "?", "*", " "

LegendKeys = Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class _Stretch:
    meaning: str
    key: str
    num_bytes: int

    @property
    def style(self) -> str:
        if self.key == UNOWNED:
            return "dim"
        return COLOURS[LETTERS.index(self.key) % len(COLOURS)] if self.key in LETTERS else ""


def signs_for(encoding: str) -> Mapping[str, str]:
    try:
        "".join(UNICODE.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def keys_of(models: Sequence[ResidentView]) -> LegendKeys:
    keys = {}
    for worker, there in groupby(models, key=lambda model: model.worker):
        letters = iter(LETTERS)
        for model in there:
            keys[worker, model.model] = next(letters, LAST)
    return keys


def pool_lines(worker: WorkerView, keys: LegendKeys, signs: Mapping[str, str], width: int) -> Iterator[Text]:
    pool = worker.pool
    if pool is None:
        return
    yield Text()
    age = f", reported {duration(pool.age_s)} ago" if pool.age_s > OLD_S else ""
    yield Text(f"{worker.worker}  {size(worker.budget_bytes)}{age}", style="bold")
    bar, owners = Text(MARGIN), Text(MARGIN)
    stretches = _stretches(worker.worker, pool.parts, keys)
    bar_width = max(MIN_BAR, min(MAX_BAR, width - 2 * len(MARGIN)))
    counts = _cells([stretch.num_bytes for stretch in stretches], bar_width)
    for stretch, num_cells in zip(stretches, counts, strict=True):
        bar.append(signs[stretch.meaning] * num_cells, stretch.style)
        owners.append(stretch.key * num_cells, stretch.style)
    owners.rstrip()
    yield bar
    if owners.plain:
        yield owners
    yield from _legend(pool.parts, signs, width)
    for fallback in fallbacks(worker):
        yield Text(MARGIN + fallback, style="yellow")


def _stretches(worker: str, parts: Sequence[PartView], keys: LegendKeys) -> list[_Stretch]:
    looks = [(_meaning(part), _key(worker, part, keys), part.num_bytes) for part in parts]
    return [
        _Stretch(meaning, key, sum(num_bytes for _, _, num_bytes in alike))
        for (meaning, key), alike in groupby(looks, key=lambda look: look[:2])
    ]


def _meaning(part: PartView) -> str:
    if part.kind == "weights":
        return "weights" if part.state == "active" else "retained"
    return "KV" if part.kind == "kv" else part.kind


def _key(worker: str, part: PartView, keys: LegendKeys) -> str:
    if part.model is not None:
        return keys.get((worker, part.model), LAST)
    return SHARED if part.kind == "weights" else UNOWNED


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    total = sum(sizes)
    if len(sizes) > width // 2:  # no space for one cell each
        ends = [sum(sizes[: number + 1]) * width // total for number in range(len(sizes))]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    cells = [max(1, round(size * width / total)) for size in sizes]
    while (excess := sum(cells) - width) != 0:
        largest = max(range(len(cells)), key=cells.__getitem__)
        cells[largest] -= 1 if excess > 0 else -1
    return cells


def _legend(parts: Sequence[PartView], signs: Mapping[str, str], width: int) -> Iterator[Text]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums[_meaning(part)] += part.num_bytes
    line = ""
    for meaning in MEANINGS:
        if not sums[meaning]:
            continue
        entry = f"{MARGIN}{signs[meaning]} {meaning} {size(sums[meaning])}"
        if line and len(line) + len(entry) > width:
            yield Text(line)
            line = ""
        line += entry
    yield Text(line)
