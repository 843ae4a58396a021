"""The shape of a step: steps of one shape share a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from hearth.core.sizes import StepLimits, decode_sizes, mixed_sizes, padded_size, sample_sizes
from hearth.policy.batch.plan import StepPlan


class StepPart(Enum):
    DECODE = "decode"  #: a whole step without prompts, by its rows
    #: A step with prompts, by its tokens: up to the last attention, or all layers if there is no tail.
    MIXED = "mixed"
    TAIL = "tail"  #: the rest of such a step, by its rows of logits


@dataclass(frozen=True, slots=True)
class GraphKey:
    part: StepPart
    size: int
    has_adapters: bool = False

    @property
    def name(self) -> str:
        return f"{self.part.value}{'-adapters' if self.has_adapters else ''}-{self.size}"


@dataclass(frozen=True, slots=True)
class StepShape:
    has_prompts: bool
    num_rows: int  #: a token each
    num_logits: int  #: rows with logits; without prompts, every row
    has_adapters: bool = False  #: which rows have one is read on the device
    has_tail: bool = True  #: False: other layers follow elsewhere
    #: Its parts, in the order in which they run.
    keys: tuple[GraphKey, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        keys = [GraphKey(StepPart.DECODE, self.num_rows, self.has_adapters)]
        if self.has_prompts:
            keys = [
                GraphKey(StepPart.MIXED, self.num_rows, self.has_adapters),
                GraphKey(StepPart.TAIL, self.num_logits, self.has_adapters),
            ]
        object.__setattr__(self, "keys", tuple(keys if self.has_tail else keys[:1]))

    @staticmethod
    def decode(num_rows: int, *, has_tail: bool = True) -> StepShape:
        return StepShape(False, num_rows, num_rows, has_tail=has_tail)


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """The sizes that steps are padded to; empty: steps are not padded."""

    decode: tuple[int, ...] = ()  #: rows of steps without prompts
    mixed: tuple[int, ...] = ()  #: rows of steps with prompts
    samples: tuple[int, ...] = ()  #: rows of logits of these
    has_tail: bool = True  #: as in `StepShape`

    @staticmethod
    def of(limits: StepLimits, *, has_tail: bool = True) -> PaddedSizes:
        return PaddedSizes(decode_sizes(limits), mixed_sizes(limits), sample_sizes(limits), has_tail)

    def all_names(self, *, has_adapters: bool = False) -> set[str]:
        return {key.name for shape in self.all_shapes(has_adapters=has_adapters) for key in shape.keys}

    def all_shapes(self, *, has_adapters: bool = False) -> list[StepShape]:
        """Return shapes that together have every key, largest first."""
        decode, mixed, samples = (sizes[::-1] for sizes in (self.decode, self.mixed, self.samples))
        kind = (has_adapters, self.has_tail)
        shapes = [
            *(StepShape(False, size, size, *kind) for size in decode),
            *(StepShape(True, size, samples[-1], *kind) for size in mixed),
        ]
        if self.has_tail:
            shapes += (StepShape(True, mixed[-1], size, *kind) for size in samples[:-1])
        return shapes

    def first_shapes(self, num_requests: int, num_tokens: int, num_decoding: int) -> list[StepShape]:
        """Return the shapes of the first two steps of requests with so many prompt tokens in all.

        `num_decoding` of them continue after their first token. The first shape is left out if prompts take
        more than one step. Empty if steps are not padded.
        """
        shapes = list[StepShape]()
        if not self.decode:
            return shapes
        if 0 < num_tokens <= self.mixed[-1] and num_requests <= self.samples[-1]:
            num_logits = padded_size(self.samples, num_requests)
            num_rows = padded_size(self.mixed, num_tokens)
            shapes.append(StepShape(True, num_rows, num_logits, has_tail=self.has_tail))
        if 0 < num_decoding <= self.decode[-1]:
            num_rows = padded_size(self.decode, num_decoding)
            shapes.append(StepShape.decode(num_rows, has_tail=self.has_tail))
        return shapes

    def shape_of(self, plan: StepPlan) -> StepShape:
        num_rows, num_logits, has_prompts = plan.num_tokens, plan.num_rows, bool(plan.prompts)
        if not has_prompts:
            num_rows = num_logits = padded_size(self.decode, num_rows) if self.decode else num_rows
        elif self.decode:
            num_rows, num_logits = padded_size(self.mixed, num_rows), padded_size(self.samples, num_logits)
        return _shape(has_prompts, num_rows, num_logits, plan.has_adapters, self.has_tail)


@lru_cache(maxsize=1024)
def _shape(
    has_prompts: bool, num_rows: int, num_logits: int, has_adapters: bool, has_tail: bool
) -> StepShape:
    return StepShape(has_prompts, num_rows, num_logits, has_adapters, has_tail)
