"""The shape of a step: what must agree for two steps to be served by one CUDA graph. Runs nothing.

Steps are padded to the next of the sizes in `core/sizes.py`, wherever kernels can tell padding from rows
that are there; elsewhere a step has just the rows of its plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from hearth.core.sizes import StepLimits, decode_sizes, mixed_sizes, padded_size, sample_sizes
from hearth.policy.batch.plan import StepPlan


class StepPart(Enum):
    """A part of a step that is captured on its own."""

    DECODE = "decode"  #: all of a step of decode rows alone, by their number
    MIXED = "mixed"  #: a step with prompts up to its last attention, by its tokens
    TAIL = "tail"  #: the rest of such a step, by its rows of logits


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A part of a step, and the number of rows that it was captured with."""

    part: StepPart
    size: int
    has_adapters: bool = False

    @property
    def name(self) -> str:
        """The name of such a graph in a snapshot."""
        return f"{self.part.value}{'-adapters' if self.has_adapters else ''}-{self.size}"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The numbers of rows that a step runs with, padding included."""

    has_prompts: bool
    num_rows: int  #: a token each
    num_logits: int  #: rows whose logits are computed; without prompts that is every row
    has_adapters: bool = False  #: some row has one; which and how many is read on the device
    #: The parts of such a step, in the order in which they run.
    keys: tuple[GraphKey, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        keys = [GraphKey(StepPart.DECODE, self.num_rows, self.has_adapters)]
        if self.has_prompts:
            keys = [
                GraphKey(StepPart.MIXED, self.num_rows, self.has_adapters),
                GraphKey(StepPart.TAIL, self.num_logits, self.has_adapters),
            ]
        object.__setattr__(self, "keys", tuple(keys))

    @staticmethod
    def decode(num_rows: int, *, has_adapters: bool = False) -> StepShape:
        return StepShape(False, num_rows, num_rows, has_adapters)


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """The sizes that steps are padded to; where there are none, they stay as they are."""

    decode: tuple[int, ...] = ()  #: rows of steps without prompts
    mixed: tuple[int, ...] = ()  #: rows of steps with prompts
    samples: tuple[int, ...] = ()  #: rows of logits of these

    @staticmethod
    def of(limits: StepLimits) -> PaddedSizes:
        return PaddedSizes(decode_sizes(limits), mixed_sizes(limits), sample_sizes(limits))

    def all_names(self, *, has_adapters: bool = False) -> set[str]:
        """Return the names, in snapshots, of the graphs that `all_shapes` has between them."""
        return {key.name for shape in self.all_shapes(has_adapters=has_adapters) for key in shape.keys}

    def all_shapes(self, *, has_adapters: bool = False) -> list[StepShape]:
        """Return shapes that have every key between them, the largest first."""
        decode, mixed, samples = (sizes[::-1] for sizes in (self.decode, self.mixed, self.samples))
        return [
            *(StepShape.decode(size, has_adapters=has_adapters) for size in decode),
            *(StepShape(True, size, samples[-1], has_adapters) for size in mixed),
            *(StepShape(True, mixed[-1], size, has_adapters) for size in samples[:-1]),
        ]

    def first_shapes(self, num_requests: int, num_tokens: int, num_decoding: int) -> list[StepShape]:
        """Return the shapes of the first two steps of requests whose prompts have so many tokens in all.

        `num_decoding` of them go on behind their first token. Where prompts take more than one step the first
        shape is left out; there are none where steps are not padded.
        """
        shapes = list[StepShape]()
        if not self.decode:
            return shapes
        if 0 < num_tokens <= self.mixed[-1] and num_requests <= self.samples[-1]:
            num_logits = padded_size(self.samples, num_requests)
            shapes.append(StepShape(True, padded_size(self.mixed, num_tokens), num_logits))
        if 0 < num_decoding <= self.decode[-1]:
            shapes.append(StepShape.decode(padded_size(self.decode, num_decoding)))
        return shapes

    def shape_of(self, plan: StepPlan) -> StepShape:
        """Return the smallest shape that holds the rows of a plan."""
        num_rows, num_logits, has_prompts = plan.num_tokens, plan.num_rows, bool(plan.prompts)
        if not has_prompts:
            num_rows = num_logits = padded_size(self.decode, num_rows) if self.decode else num_rows
        elif self.decode:
            num_rows, num_logits = padded_size(self.mixed, num_rows), padded_size(self.samples, num_logits)
        return _shape(has_prompts, num_rows, num_logits, plan.has_adapters)


@lru_cache(maxsize=1024)
def _shape(has_prompts: bool, num_rows: int, num_logits: int, has_adapters: bool) -> StepShape:
    return StepShape(has_prompts, num_rows, num_logits, has_adapters)
