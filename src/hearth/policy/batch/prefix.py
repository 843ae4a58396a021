"""Prefixes of token sequences by content: which blocks hold them, and how much of a sequence is known.

Most prompts begin with a block that was never seen and is never seen again. So a sequence publishes a *run*
of blocks, and only the first is found by its digest. From there on tokens are compared; a digest is needed
again where they differ, which may find another run that branches off there.

    run of blocks 0 to 4        [A B C D E]     by the digest of A
    branches off behind B           [X Y]       by the digest of A B X

A sequence that holds a block of a run holds those before it, too. So the last blocks of a run are evicted
first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hearth.policy.batch.digest_chain import DigestChain, chained_digests

#: Runs are in this many dicts, each so small that resizing one does not delay a step.
_NUM_SHARDS = 256

#: Blocks that are removed from the end of a run at once, which limits comparisons when runs alternate.
_MAX_POPPED = 64


class PrefixRun:
    """Consecutive blocks. Mutable; written only by the `PrefixIndex` that has it.

    A run that was removed from the index has no blocks.
    """

    __slots__ = (
        "_block_tokens",
        "_digests",
        "_parted",
        "blocks",
        "branched",
        "first",
        "num_extended",
        "tokens",
    )

    def __init__(self, first: int, digest: bytes, blocks: list[int], tokens: array[int]) -> None:
        """The first of the `blocks` is block `first` of its sequence and has this digest."""
        self.first = first
        self.blocks = blocks
        self.tokens = tokens  #: of these blocks alone
        self._block_tokens = len(tokens) // len(blocks)
        self._digests = [digest]  #: of the first blocks, as far as they were needed
        self._parted = 0  #: the block up to which the last compared chain was equal
        self.branched = 0  #: the last block at which another run ever branched off
        self.num_extended = 0  #: how often; while it is the same, the run only lost blocks

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    @property
    def digest(self) -> bytes:
        return self._digests[0]

    def alike_until(self, chain: DigestChain, begin: int, end: int) -> int:
        """Return up to which block, at most `end`, the run equals a chain, which it does up to `begin`."""
        end, size, own, tokens = min(end, self.end), self._block_tokens, self.tokens, chain.tokens
        offset = self.first * size

        def is_alike(first: int, last: int) -> bool:
            first, last = first * size, last * size
            return own[first - offset : last - offset] == tokens[first:last]

        # Most chains differ in the next block, or where the last one did, behind a common beginning.
        parted, num_more = self._parted, 1
        while begin < end:
            num_more = min(num_more, end - begin)
            if is_alike(begin, begin + num_more):
                begin += num_more
                num_more = 1 if begin == parted else parted - begin if begin < parted else end - begin
            elif num_more == 1:
                break
            else:
                end, num_more = begin + num_more - 1, num_more // 2
        self._parted = begin
        return begin

    def lend_digests(self, chain: DigestChain, end: int) -> None:
        if chain.num_known >= end:
            return
        num_digests, num_blocks = len(self._digests), end - self.first
        if num_digests < num_blocks:
            tokens = self.tokens[num_digests * self._block_tokens : num_blocks * self._block_tokens]
            self._digests += chained_digests(self._digests[-1], tokens, self._block_tokens)
        chain.adopt(self.first, self._digests[:num_blocks])

    def extend(self, blocks: Sequence[int], tokens: array[int]) -> None:
        self.blocks += blocks
        self.tokens += tokens
        self.num_extended += 1

    def pop_last(self, blocks: Sequence[int]) -> int:
        """Remove the last blocks as long as they equal the first of the given ones; return how many.

        `blocks`: the last one first.
        """
        num_gone = min(len(self.blocks), len(blocks))
        last = self.blocks[-num_gone:]
        last.reverse()
        if last != blocks[:num_gone]:
            pairs = enumerate(zip(last, blocks, strict=False))
            num_gone = next(at for at, (own, given) in pairs if own != given)
        self._keep(len(self.blocks) - num_gone)
        return num_gone

    def cut(self, block: int) -> list[int]:
        at = len(self.blocks) - 1
        while self.blocks[at] != block:  # from the end: each that is looked at goes
            at -= 1
        behind = self.blocks[at + 1 :]
        self._keep(at)
        return behind

    def clear(self) -> None:
        self._keep(0)

    def _keep(self, num_blocks: int) -> None:
        del self.blocks[num_blocks:]
        del self.tokens[num_blocks * self._block_tokens :]
        del self._digests[max(1, num_blocks) :]

    def check(self) -> None:
        num_blocks, size = len(self.blocks), self._block_tokens
        assert self.blocks, "a run of no blocks is found by its digest"
        assert len(self.tokens) == num_blocks * size, f"{len(self.tokens)=} {num_blocks=} {size=}"
        assert len(self._digests) <= num_blocks, f"{len(self._digests)=} {num_blocks=}"
        expected = chained_digests(self._digests[0], self.tokens[size : len(self._digests) * size], size)
        assert self._digests[1:] == expected, f"{self._digests=} {expected=}"


class Publication(NamedTuple):
    chain: DigestChain
    begin: int  #: the block of the chain that is in the first of `blocks`
    before: int | None  #: the block before, of the same sequence; None: there is none
    blocks: list[int]


class PrefixIndex:
    """Runs by digest and by block. Mutable; written only by the `BlockBook` that owns it."""

    def __init__(self) -> None:
        self.runs: list[PrefixRun | None] = []  #: by block; None: nothing leads to it
        #: The runs by the digests of their first blocks, by the first byte of these.
        self._shards: list[dict[bytes, PrefixRun]] = [{} for _ in range(_NUM_SHARDS)]

    def __contains__(self, block: int) -> bool:
        return block < len(self.runs) and self.runs[block] is not None

    def __iter__(self) -> Iterator[int]:
        return (block for block, run in enumerate(self.runs) if run is not None)

    def reserve(self, num_blocks: int) -> None:
        self.runs.extend([None] * (num_blocks - len(self.runs)))

    def find(self, digest: bytes) -> PrefixRun | None:
        return self._shards[digest[0]].get(digest)

    def match(self, chain: DigestChain) -> list[int]:
        prefix = KnownPrefix()
        prefix.follow(self, chain, len(chain.tokens) // chain.block_tokens)
        return prefix.blocks

    def add(self, publication: Publication) -> None:
        """Make blocks findable by their content. Of two with the same known digest the first stays."""
        chain, begin, before, blocks = publication
        runs, end = self.runs, begin + len(blocks)
        run = None if before is None else runs[before]
        if run is None or run.blocks[-1] != before or begin <= run.branched:
            if run is None and begin:  # the blocks before are in other runs, or were withdrawn
                known, run = self._known_until(chain, 0, begin, None)
                run = run if known == begin else None
            known, parent = self._known_until(chain, begin, end, run)
            if known == end:
                return
            if parent is not None:
                parent.branched = max(parent.branched, known)
            blocks, begin, run = blocks[known - begin :], known, None
        size = chain.block_tokens
        tokens = chain.tokens[begin * size : end * size]
        if run is None:
            digest = chain.digest(begin)
            run = self._shards[digest[0]][digest] = PrefixRun(begin, digest, blocks, tokens)
        else:
            assert run.end == begin, f"{run.end=} {begin=}"
            run.extend(blocks, tokens)
        assert not any(map(runs.__getitem__, blocks)), f"published twice: {blocks=}"
        for block in blocks:
            runs[block] = run

    def _known_until(
        self, chain: DigestChain, begin: int, end: int, run: PrefixRun | None
    ) -> tuple[int, PrefixRun | None]:
        """Return up to which block, from `begin` to `end`, the index holds a chain, and the last run.

        `run`: the one that holds the block before `begin`, if any.
        """
        while begin < end:
            if run is not None:
                begin = run.alike_until(chain, begin, end)
                if begin == end:
                    break
                run.lend_digests(chain, begin)
            if (found := self.find(chain.digest(begin))) is None:
                break
            run = found
        return begin, run

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Remove blocks whose content is lost; return those behind them in their runs, removed as well."""
        runs, lost, at = self.runs, dict[int, None](), 0
        while at < len(blocks):
            run = runs[blocks[at]]
            if run is None:
                assert blocks[at] in lost, f"nothing leads to it: {blocks[at]}"
                del lost[blocks[at]]
                at += 1
                continue
            num_gone = run.pop_last(blocks[at : at + _MAX_POPPED])
            if not num_gone:
                num_gone, behind = 1, run.cut(blocks[at])
                for block in behind:
                    runs[block] = lost[block] = None
            for block in blocks[at : at + num_gone]:
                runs[block] = None
            at += num_gone
            if not run.blocks:
                del self._shards[run.digest[0]][run.digest]
        return list(lost)

    def move(self, targets: Mapping[int, int]) -> None:
        runs, moved = self.runs, set[PrefixRun]()
        for source, target in targets.items():
            if (run := runs[source]) is not None:
                runs[source], runs[target] = None, run
                moved.add(run)
        for run in moved:
            run.blocks = [targets.get(block, block) for block in run.blocks]

    def clear(self) -> None:
        self.runs = [None] * len(self.runs)
        for shard in self._shards:
            for run in shard.values():
                run.clear()
            shard.clear()

    def check(self) -> None:
        found = {digest: run for shard in self._shards for digest, run in shard.items()}
        for digest, run in found.items():
            assert run.digest == digest, f"found by the digest of others: {run.blocks}"
            run.check()
        led_to = {block: id(run) for block, run in enumerate(self.runs) if run is not None}
        inverse = {block: id(run) for run in found.values() for block in run.blocks}
        assert led_to == inverse, f"{led_to=} {inverse=}"
        assert len(inverse) == sum(len(run.blocks) for run in found.values()), "a block is in two runs"


class KnownPrefix:
    """The known prefix of one waiting sequence. Mutable; written only by `follow`."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        #: Consecutive runs, with the block of the sequence up to which each is equal, and its `num_extended`.
        self._parts: list[tuple[PrefixRun, int, int]] = []

    @property
    def blocks(self) -> list[int]:
        blocks: list[int] = []
        for run, end, _ in self._parts:
            blocks += run.blocks[: end - run.first]
        return blocks

    def __len__(self) -> int:
        return self._parts[-1][1] if self._parts else 0

    def follow(self, index: PrefixIndex, chain: DigestChain, num_most: int) -> None:
        """Update the prefix, up to `num_most` blocks of the same chain."""
        parts = self._parts
        if parts:
            self._drop_gone(chain)
        run, num_known = parts[-1][:2] if parts else (None, 0)
        while num_known < num_most:
            if run is not None:
                num_known = run.alike_until(chain, num_known, num_most)
                parts[-1] = (run, num_known, run.num_extended)
                if num_known == num_most:
                    break
                run.lend_digests(chain, num_known)
            if (run := index.find(chain.digest(num_known))) is None:
                break
            num_known += 1
            parts.append((run, num_known, run.num_extended))

    def _drop_gone(self, chain: DigestChain) -> None:
        for at, (run, end, num_extended) in enumerate(self._parts):
            until = run.end
            if until >= end and run.num_extended == num_extended:
                continue
            if run.num_extended != num_extended:  # perhaps by other blocks than those it had lost
                until = run.alike_until(chain, run.first, end)
                self._parts[at] = (run, until, run.num_extended)
            if until < end:
                self._parts[at:] = [(run, until, run.num_extended)] if until > run.first else []
                break

    def collect(self, blocks: set[int]) -> None:
        """Add all blocks of the prefix to `blocks`; those before one that is there are there too."""
        for run, end, _ in reversed(self._parts):
            for at in range(end - run.first - 1, -1, -1):
                if (block := run.blocks[at]) in blocks:
                    return
                blocks.add(block)
