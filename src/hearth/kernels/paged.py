"""The rows of a step: each is a token of a sequence whose KV is in blocks.

    one KV layer:  [block][k|v][token][kv head][dim]      blocks `stride(0)` elements apart

The Triton kernels read the block table. The torch references need tensors that are the same in every layer,
so these are derived once and kept with the rows, which last for one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Heads:
    num_q: int
    num_kv: int
    dim: int
    scale: float | None = None  #: of scores; None: dim ** -0.5
    cap: float | None = None  #: scores become cap * tanh(score / cap)

    @property
    def score_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class KvTargets:
    blocks: torch.Tensor  #: int64 [rows]
    offsets: torch.Tensor  #: int64 [rows], in the block


@dataclass(frozen=True, slots=True)
class RotaryFactors:
    cos: torch.Tensor  #: [rows, 1, rotary_dim]: both halves alike
    sin: torch.Tensor  #: the same, with the first half negated


@dataclass(frozen=True, slots=True)
class Context:
    num_rows: int
    num_tokens: int  #: of the longest row
    blocks: torch.Tensor  #: int64 [rows * blocks]
    seen: torch.Tensor | None  #: bool [rows, 1, 1, tokens]; None: every row attends to all tokens
    unseen: torch.Tensor | None  #: indices where `seen` is false, over all blocks

    def read(self, kv: torch.Tensor) -> torch.Tensor:
        """Gather k or v as [rows, kv_heads, tokens, dim] from `kv` [blocks, block_tokens, kv_heads, dim]."""
        gathered = kv.index_select(0, self.blocks)
        if self.unseen is not None:
            # Unwritten or recycled memory may hold NaN, and 0 times NaN is NaN.
            gathered.flatten(0, 1).index_fill_(0, self.unseen, 0)
        return gathered.view(self.num_rows, -1, *kv.shape[2:])[:, : self.num_tokens].transpose(1, 2)


@dataclass(slots=True, eq=False)
class PagedRows:
    """The rows of a step and their place in paged KV. Tensors that all layers share are derived once."""

    positions: torch.Tensor  #: int32 [rows], of the token in its sequence
    slots: torch.Tensor  #: int32 [rows], the sequence's row of the block table
    block_table: torch.Tensor  #: int32 [slots, blocks]
    _kv_targets: KvTargets | None = None
    _rotary_factors: dict[int, RotaryFactors] = field(default_factory=dict)  #: by address of the table
    _contexts: dict[int | None, Context] = field(default_factory=dict)  #: by window

    def first(self, count: int) -> PagedRows:
        return PagedRows(self.positions[:count], self.slots[:count], self.block_table)

    def kv_targets(self, block_tokens: int) -> KvTargets:
        if self._kv_targets is None:
            at = self.positions.long()
            blocks = self.block_table[self.slots, at // block_tokens].long()
            self._kv_targets = KvTargets(blocks, at % block_tokens)
        return self._kv_targets

    def rotary_factors(self, cos_sin: torch.Tensor) -> RotaryFactors:
        found = self._rotary_factors.get(cos_sin.data_ptr())
        if found is None:
            cos, sin = cos_sin[self.positions].unsqueeze(2).unbind(1)
            found = RotaryFactors(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
            self._rotary_factors[cos_sin.data_ptr()] = found
        return found

    def context(self, block_tokens: int, window: int | None) -> Context:
        if window not in self._contexts:
            self._contexts[window] = self._look_back(block_tokens, window)
        return self._contexts[window]

    def _look_back(self, block_tokens: int, window: int | None) -> Context:
        positions, num_rows = self.positions, len(self.positions)
        num_tokens = int(positions.max()) + 1
        num_blocks = -(-num_tokens // block_tokens)
        blocks = self.block_table[self.slots, :num_blocks].long().flatten()
        steps = torch.arange(num_blocks * block_tokens, device=positions.device)
        seen = steps <= positions[:, None]
        if window is not None:
            seen &= steps > positions[:, None] - window
        if seen[:, :num_tokens].all():
            return Context(num_rows, num_tokens, blocks, None, None)
        unseen = seen.logical_not().flatten().nonzero().squeeze(-1)
        return Context(num_rows, num_tokens, blocks, seen[:, None, None, :num_tokens], unseen)
