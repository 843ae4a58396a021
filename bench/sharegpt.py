"""Lengths of real conversations, in the order in which benchmarks ask for them. Holds no text."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from functools import cache
from random import Random

from bench.report import HERE

#: What is longer or shorter is cut to these, ends included.
PROMPT_TOKENS, NEW_TOKENS = (4, 2000), (2, 900)
_SEED = 11


@dataclass(frozen=True, slots=True)
class Lengths:
    """The tokens of one request."""

    prompt: int
    new: int

    def clipped(self, most: Lengths | None) -> Lengths:
        return self if most is None else Lengths(min(self.prompt, most.prompt), min(self.new, most.new))


@cache
def conversations() -> tuple[Lengths, ...]:
    """Return all 58,787 of them, shuffled, the same in every run."""
    with gzip.open(HERE / "data" / "sharegpt" / "lengths.csv.gz", "rt", encoding="utf-8") as lines:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]
    Random(_SEED).shuffle(rows)
    return tuple(Lengths(_within(*PROMPT_TOKENS, prompt), _within(*NEW_TOKENS, new)) for prompt, new in rows)


def _within(least: int, most: int, value: int) -> int:
    return min(max(value, least), most)
