"""The KV of a batch between steps: how much the next step needs, what can go back, and taking it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.decode_run import blocks_wanted_by
from hearth.policy.batch.elastic import KvUse
from hearth.policy.batch.late_books import LateBooks
from hearth.policy.batch.preemption import preempted_for_extent
from hearth.policy.batch.sequence import LiveSequence, Sequences


class BatchKv:
    """A part of the `Batcher`, which owns all that it changes. Settles the books before it reads them."""

    def __init__(
        self,
        limits: BatchLimits,
        blocks: BlockBook,
        sequences: Sequences,
        books: LateBooks,
        preempt: Callable[[LiveSequence], None],
    ) -> None:
        self._limits, self._blocks, self._sequences, self._books = limits, blocks, sequences, books
        self._preempt = preempt

    def use(self) -> KvUse:
        num_wanted = self.wanted_blocks()  # settles the books
        return KvUse(
            num_blocks=self._blocks.num_blocks,
            num_live=self._blocks.num_live,
            num_cached=len(self._blocks.cached),
            num_wanted=num_wanted,
            num_running=self._sequences.num_running,
        )

    def wanted_blocks(self) -> int:
        self._books.settle()
        blocks = self._blocks
        tokens_left, num_wanted = self._limits.max_batch_tokens, 0
        for sequence in self._sequences.decoding():
            num_planned = sequence.num_planned
            if num_planned < sequence.max_planned:
                tokens_left -= 1
                num_wanted += num_planned == sequence.room_tokens
        if (midway := self._sequences.midway()) is not None:
            tokens_left -= midway.num_prefill - midway.num_planned
            num_wanted += blocks.num_blocks_of(midway.num_prefill) - len(midway.blocks)
        for sequence in self._admissible():
            if tokens_left <= 0:
                break
            num_hits = len(sequence.known_prefix(blocks.prefixes))
            num_tokens = len(sequence.tokens)
            tokens_left -= num_tokens - num_hits * blocks.block_tokens
            num_wanted += blocks.num_blocks_of(num_tokens) - num_hits
        return num_wanted

    def blocks_wanted_by(self, num_steps: int) -> int:
        """Return how many blocks are needed by steps that only give every running sequence a token."""
        return blocks_wanted_by(self._sequences.running(), num_steps, self._blocks.block_tokens)

    def expected_blocks(self, num_tokens: int) -> int:
        """Return how many blocks requests would hold if each that has a slot made `num_tokens` more.

        But no more than it has made so far: most end soon, and as many others begin.
        """
        self._books.settle()
        blocks, num_expected = self._blocks, self._blocks.num_live
        for sequence in self._sequences.running():
            begun = max(sequence.num_planned, sequence.num_prefill)
            length = min(sequence.max_length, begun + min(num_tokens, sequence.num_output))
            num_expected += max(0, blocks.num_blocks_of(length) - len(sequence.blocks))
        for sequence in self._sequences.waiting_for_kv():
            length = min(sequence.max_length, len(sequence.tokens) + min(num_tokens, sequence.num_output))
            num_expected += blocks.num_blocks_of(length) - len(sequence.known_prefix(blocks.prefixes))
        return num_expected

    def _admissible(self) -> Iterator[LiveSequence]:
        yield from self._sequences.next_in_line()
        first = self._sequences.first_waiting()
        if first is not None and not self._sequences.has_free_slot and self._sequences.behind(first):
            yield first

    def cached_to_spare(self) -> int:
        """Return how many cached blocks are in no known prefix of a sequence that could start."""
        self._books.settle()
        hits: set[int] = set()
        for sequence in self._sequences.next_in_line():
            sequence.known_prefix(self._blocks.prefixes).collect(hits)
        return len(self._blocks.cached) - len(self._blocks.cached.among(hits))

    def add(self, extent: range) -> None:
        self._blocks.add(extent)

    def remove_all(self) -> None:
        self._books.settle()
        self._blocks.remove_all()

    def clear(
        self, extent: range, *, may_move: bool, may_preempt: bool, keeps_floor: bool = True
    ) -> list[BlockMove] | None:
        """Remove an extent of blocks; None: not possible, nothing changed.

        The returned moves must be copied on the device behind the steps in flight and before the next one.
        `keeps_floor`: preempt nothing if less than the promised KV would be left.
        """
        self._books.settle()
        blocks = self._blocks
        if keeps_floor and blocks.num_blocks - len(extent) < blocks.floor_blocks:
            may_preempt = False
        preempted = preempted_for_extent(
            blocks, self._sequences.running(), extent, may_move=may_move, may_preempt=may_preempt
        )
        if preempted is None:
            return None
        for sequence in preempted:
            self._preempt(sequence)
        moves = blocks.remove(extent)
        self._sequences.follow(moves)
        return moves
