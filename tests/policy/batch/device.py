"""A device that remembers, and a step loop around a batcher that checks all that must hold at any time.

The fake device holds its KV as `(block, offset) -> what was written` and samples a hash of what it reads
back through its block tables. So a wrong table, a stale prefix or a late write changes some output.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hearth.core.errors import GuideStuck, HearthError, LogitsNotFinite
from hearth.core.types import AdapterId, FinishReason, Pooling, RequestId, SamplingParams
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.plan import CommittedStep, EngineRequest, Row, StepPlan
from hearth.policy.batch.sequence import LiveSequence

VOCABULARY = 11
STOP = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """The KV of one token depends on the adapter and on all tokens up to it; nobody reads another's salt."""

    salt: bytes
    adapter: AdapterId | None
    position: int
    token: int
    text: int  #: stands for the token and all before it

    @staticmethod
    def behind(before: Cell | None, salt: bytes, adapter: AdapterId | None, token: int) -> Cell:
        """What a token becomes behind what is read of the one before it; None: it is the first."""
        position, text = (0, 0) if before is None else (before.position + 1, before.text)
        return Cell(salt, adapter, position, token, hash((text, token)))


def next_token(
    salt: bytes, tokens: Sequence[int], mask: bytes | None = None, adapter: AdapterId | None = None
) -> int:
    allowed = [t for t in range(VOCABULARY) if mask is None or mask[t // 8] >> t % 8 & 1]
    return allowed[zlib.crc32((adapter or "").encode() + salt + bytes(tokens)) % len(allowed)]


class Alternating:
    """A guide: even and odd tokens in turns, `length` of them, of which no stop token is one.

    Behind token `stuck_at` it knows no further. The first `num_free_first` tokens may be any.
    """

    def __init__(
        self,
        length: int,
        stuck_at: int | None = None,
        taken: Sequence[int] = (),
        num_free_first: int = 0,
    ) -> None:
        self.length, self.stuck_at, self.num_free_first = length, stuck_at, num_free_first
        self.taken = list(taken)

    @property
    def num_free(self) -> int:
        return max(0, self.num_free_first - len(self.taken))

    @property
    def mask(self) -> bytes:
        assert not self.num_free
        parity = len(self.taken) % 2
        bits = sum(1 << t for t in range(VOCABULARY) if t % 2 == parity and t not in (STOP, 7))
        return bits.to_bytes(4, "little")

    def take(self, token: int) -> FinishReason | None:
        assert self.num_free or self.mask[token // 8] >> token % 8 & 1, f"{token=} is not allowed"
        self.taken.append(token)
        if len(self.taken) == self.length:
            return FinishReason.STOP
        if len(self.taken) == self.stuck_at:
            raise GuideStuck(f"stuck behind token {self.stuck_at}")
        return None

    def afresh(self, taken: Sequence[int] = ()) -> Alternating:
        return Alternating(self.length, self.stuck_at, taken, self.num_free_first)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What is committed later."""

    plan: StepPlan
    tokens: list[int]
    broken_rows: list[int]
    written: frozenset[int]  #: the blocks that it wrote to


@dataclass(frozen=True, slots=True)
class Emission:
    """One committed token of a live request."""

    request_id: RequestId
    token: int
    sample_index: int
    finish_reason: FinishReason | None


class FakeDevice:
    """Executes plans and copies in order. Mutable; written only by `run` and `copy`."""

    def __init__(self, book: BlockBook, *, is_pipeline: bool = False) -> None:
        self.book = book  #: only what it has may be touched
        self.is_pipeline = is_pipeline  #: the first stage knows a token when its step is committed
        self.nan_token: int | None = None  #: its KV is NaN, and so are the logits of all that read it
        self.salts: dict[RequestId, bytes] = {}
        self.memory: dict[tuple[int, int], Cell] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.slot_tokens: dict[int, int] = {}

    def copy(self, moves: Sequence[BlockMove]) -> None:
        sources, targets = {move.source for move in moves}, {move.target for move in moves}
        assert len(sources) == len(targets) == len(moves)
        assert not sources & targets
        for move in moves:
            for offset in range(self.book.block_tokens):
                self.memory.pop((move.target, offset), None)
                if cell := self.memory.get((move.source, offset)):
                    self.memory[move.target, offset] = cell

    def run(self, plan: StepPlan) -> StepInFlight:
        for admission in plan.admissions:
            self.tables[admission.slot] = {}
            self.slot_tokens.pop(admission.slot, None)
        cells: set[tuple[int, int]] = set()
        for write in plan.table_writes:
            for index, block in enumerate(write.blocks, start=write.begin):
                assert (write.slot, index) not in cells, f"written twice, in no order: {write}"
                cells.add((write.slot, index))
                self.tables[write.slot][index] = block
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            tokens = (self.slot_tokens[row.slot],) if row.tokens is None else row.tokens
            assert len(tokens) == row.num_tokens
            before = self.memory[self._address(row.slot, row.start - 1)] if row.start else None
            for position, token in enumerate(tokens, start=row.start):
                address = self._address(row.slot, position)
                assert address not in written, f"two rows write {address=}"
                written.add(address)
                before = Cell.behind(before, self.salts[row.request_id], row.adapter, token)
                assert before.position == position, f"{row=} {before=}"
                self.memory[address] = before
        for admission in plan.admissions:
            found = [cell.token for cell in self._cells(admission.slot, admission.num_cached_tokens)]
            assert found == list(admission.tokens[: len(found)]), f"a prefix of another text: {admission}"
        for row in plan.rows:
            self._check_own(row)
        self._check_index()
        tokens = [self._sample(row) for row in plan.rows if row.samples]
        broken = [
            at for at, row in enumerate(plan.rows) if self.nan_token in (c.token for c in self._read(row))
        ]
        return StepInFlight(plan, tokens, broken, frozenset(block for block, _ in written))

    def _check_index(self) -> None:
        """Whatever the index leads to is written, as far as steps were launched, and with that very text."""
        for run in {id(run): run for run in self.book.prefixes.runs if run is not None}.values():
            size = self.book.block_tokens
            cells = [self.memory[block, offset] for block in run.blocks for offset in range(size)]
            assert [cell.token for cell in cells] == list(run.tokens), (
                f"the index leads to another text: {run.blocks}"
            )
            first = run.first * size
            assert [cell.position for cell in cells] == list(range(first, first + len(cells)))

    def has_nan(self, block: int) -> bool:
        cells = (self.memory.get((block, offset)) for offset in range(self.book.block_tokens))
        return any(cell is not None and cell.token == self.nan_token for cell in cells)

    def _read(self, row: Row) -> list[Cell]:
        return self._cells(row.slot, row.end)

    def _cells(self, slot: int, num_tokens: int) -> list[Cell]:
        return [self.memory[self._address(slot, position)] for position in range(num_tokens)]

    def _check_own(self, row: Row) -> None:
        """All that a row reads was computed with its salt and adapter, behind the very tokens before it."""
        before: Cell | None = None
        for cell in self._read(row):
            before = Cell.behind(before, self.salts[row.request_id], row.adapter, cell.token)
            assert cell == before, f"reads what was not written for it: {row=} {cell=}"

    def _sample(self, row: Row) -> int:
        salt = self.salts[row.request_id]
        token = next_token(salt, [cell.token for cell in self._read(row)], row.mask, row.adapter)
        if not self.is_pipeline:
            self.slot_tokens[row.slot] = token
        return token

    def take_tokens(self, step: StepInFlight) -> None:
        slots = [row.slot for row in step.plan.rows if row.samples]
        self.slot_tokens.update(zip(slots, step.tokens, strict=True))

    def _address(self, slot: int, position: int) -> tuple[int, int]:
        block_tokens = self.book.block_tokens
        block = self.tables[slot][position // block_tokens]
        assert self.book.has_all([block]), f"a block that is not there, or the sink: {slot=} {position=}"
        return block, position % block_tokens


class Loop:
    """A step loop around the batcher that checks all that must hold at any time."""

    def __init__(self, limits: BatchLimits, book: BlockBook, num_flights: int | None = None) -> None:
        self.limits = limits
        self.max_prompt_tokens: int | None = None  #: beside those that decode, for all plans from now on
        self.batcher = Batcher(limits, book, num_flights)
        self.device = FakeDevice(book, is_pipeline=num_flights is not None)
        self.in_flight: deque[StepInFlight] = deque()
        self.ahead: StepPlan | None = None  #: planned by `plan_ahead` and not run yet
        #: Whose the rows of each of them are: by now an id may have another owner.
        self.owners: deque[dict[RequestId, EngineRequest]] = deque()
        self.live: dict[RequestId, EngineRequest] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.reasons: dict[RequestId, FinishReason | type[HearthError]] = {}
        #: Rows that were read, by request, since its prompt was last begun.
        self.read_rows: dict[RequestId, list[Row]] = {}

    def add(self, request: EngineRequest) -> None:
        self.undo_ahead()
        self.batcher.add(request)
        self.device.salts[request.request_id] = request.salt
        self.live[request.request_id] = request
        self.outputs[request.request_id] = []
        self.read_rows.pop(request.request_id, None)
        self.reasons.pop(request.request_id, None)
        self.batcher.check()

    def launch(self) -> StepPlan | None:
        self.undo_ahead()
        midway = self.batcher._sequences.midway()
        plan = self.batcher.plan(self.max_prompt_tokens)
        self.batcher.check()
        if plan is None:
            return None
        assert plan.rows
        assert all(row.num_tokens >= 1 for row in plan.rows)
        assert plan.num_tokens <= self.limits.max_batch_tokens
        for row in plan.rows:
            owner = self.live[row.request_id]
            if owner.guide is None or not row.samples:
                assert row.mask is None
            elif isinstance(owner.guide, Alternating):
                num_before = row.end - len(owner.prompt)  #: of the output, tokens in flight included
                assert (row.mask is None) == (num_before < owner.guide.num_free_first)
            assert row.reading is None or not (owner.output or self.outputs[row.request_id]), "read twice"
        assert self.batcher.num_running <= self.limits.max_seqs
        is_decode = [row.tokens is None for row in plan.rows]
        assert is_decode == sorted(is_decode, reverse=True)
        assert all(row.samples for row in plan.rows[:-1])
        self._check_prompts(plan, midway)
        if self.device.is_pipeline:
            others = {slot for step in self.in_flight for slot in step.plan.decode.slots}
            assert others.isdisjoint(plan.decode.slots), "its last token is not known"
        self._run(plan)
        return plan

    def _run(self, plan: StepPlan) -> None:
        self.in_flight.append(self.device.run(plan))
        self.owners.append({row.request_id: self.live[row.request_id] for row in plan.rows})

    def plan_ahead(self) -> StepPlan | None:
        """Plan the step that `commit` runs once the tokens of the oldest step are known."""
        assert self.ahead is None
        self.ahead = self.batcher.plan_ahead()
        self.batcher.check()
        if self.ahead is not None:
            assert len(self.ahead.decode)
            assert not self.ahead.prompts
            assert self.ahead.num_tokens <= self.limits.max_batch_tokens
            known, *unknown = (set(step.plan.sampled_ids) for step in self.in_flight)
            assert known.issuperset(self.ahead.request_ids), "its last token will not be known"
            assert not set(self.ahead.request_ids).intersection(*unknown or [()])
            assert not any(self.live[name].guide for name in self.ahead.request_ids)
        return self.ahead

    def undo_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead = None
            self.batcher.undo_ahead()
            self.batcher.check()

    def _check_prompts(self, plan: StepPlan, midway: LiveSequence | None) -> None:
        """Prompts keep their limit beside those that decode, advance in order and are cut at blocks.

        Beyond their limit they have what the step would be padded with, up to a size, and are cut there.
        """
        block_tokens = self.batcher.blocks.block_tokens
        tokens_left = self.limits.max_batch_tokens - plan.num_decode_rows
        names = plan.decode.request_ids
        if self.max_prompt_tokens is not None and any(self.live[name].is_streamed for name in names):
            most_tokens = plan.num_decode_rows + max(self.max_prompt_tokens, block_tokens)
            assert plan.num_tokens <= self._padded(most_tokens)
        has_begun_anew = midway is not None and midway.request_id in [a.request_id for a in plan.admissions]
        if midway is not None and midway.slot is not None and tokens_left and not has_begun_anew:
            assert plan.prompts[0].request_id == midway.request_id, "who has begun goes on"
        assert all(row.samples or row.end % block_tokens == 0 for row in plan.prompts) or (
            tokens_left < block_tokens or plan.num_tokens in self.limits.step_sizes
        )

    def _padded(self, num_tokens: int) -> int:
        """Return the tokens that a step with prompts is padded to."""
        return min((size for size in self.limits.step_sizes if size >= num_tokens), default=num_tokens)

    def commit(self) -> list[Emission]:
        step, owners = self.in_flight.popleft(), self.owners.popleft()
        if self.device.is_pipeline:
            self.device.take_tokens(step)
        if self.ahead is not None:
            plan, self.ahead = self.ahead, None
            self._run(plan)
        for row in step.plan.prompts:
            is_late = self.live.get(row.request_id) is not owners[row.request_id]
            if row.reading is not None and not is_late:
                rows = self.read_rows.setdefault(row.request_id, [])
                if row.start == 0:
                    rows.clear()
                rows.append(row)
        if step.plan.step_id % 3:
            committed = self.batcher.commit(step.plan, step.tokens, step.broken_rows)
            self.batcher.check()
        else:  # which whatever comes next has to settle
            committed = self.batcher.take_tokens(step.plan, step.tokens, step.broken_rows)
        emissions = _emissions(committed)
        for emission in emissions:
            request, output = self.live[emission.request_id], self.outputs[emission.request_id]
            if not request.output and not output:
                self._check_read(request, self.read_rows.pop(emission.request_id, []))
            output.append(emission.token)
        for request_id, end in _ends(committed).items():
            request, output = self.live.pop(request_id), self.outputs[request_id]
            assert ([*request.output, *output], end) == self.expected(request)
            self.reasons[request_id] = end
        self.batcher.settle()
        unconfirmed = {block for step in self.in_flight for block in step.written}
        found = [block for block in self.batcher.blocks.prefixes if block not in unconfirmed]
        poisoned = [block for block in found if self.device.has_nan(block)]
        assert not poisoned, f"others would read NaN: {poisoned}"
        return emissions

    def _check_read(self, request: EngineRequest, rows: Sequence[Row]) -> None:
        """All that is wanted of a prompt was read when its first token comes, and each part of it once."""
        num_logprobs, prompt = request.sampling.prompt_logprobs, request.prompt
        readings = [row.reading for row in rows if row.reading is not None]
        assert all(one.num_logprobs == num_logprobs for one in readings)
        pooled = [row.end for row in rows if row.reading is not None and row.reading.pooling is not None]
        match request.pooling:
            case None:
                assert not pooled
            case Pooling.LAST:
                assert pooled == [len(prompt)]
            case Pooling.MEAN:
                assert pooled == [row.end for row in rows]
        if request.pooling is Pooling.MEAN or num_logprobs is not None:
            assert [row.start for row in rows] == [0, *(row.end for row in rows[:-1])]
            assert rows[-1].end == len(prompt)
        targets = tuple(token for one in readings for token in one.targets)
        assert targets == (() if num_logprobs is None else prompt[1:])

    def cancel(self, request_id: RequestId) -> None:
        self.undo_ahead()
        request = self.live.pop(request_id)
        output = self.outputs[request_id]
        assert self.batcher.cancel(request_id)
        so_far = [*request.output, *output]
        assert so_far == self.expected(request)[0][: len(so_far)]
        self.reasons[request_id] = FinishReason.CANCELLED
        self.batcher.check()

    def resume(self, request_id: RequestId, new_id: RequestId) -> None:
        """Go on with a live request as if its worker had been lost."""
        request, output = self.live[request_id], self.outputs[request_id]
        so_far = (*request.output, *output)
        guide = request.guide.afresh(so_far) if isinstance(request.guide, Alternating) else None
        self.cancel(request_id)
        self.add(replace(request, request_id=new_id, output=so_far, guide=guide))

    def computed(self, request_id: RequestId) -> list[Cell]:
        """Return the KV that a request could take elsewhere."""
        self.undo_ahead()
        blocks, size = self.batcher.computed_blocks(request_id), range(self.batcher.blocks.block_tokens)
        return [self.device.memory[block, offset] for block in blocks for offset in size]

    def receive(self, request: EngineRequest, cells: Sequence[Cell]) -> int:
        """Take in KV of a request that comes next; return how many tokens of it are known then."""
        self.undo_ahead()
        size = self.batcher.blocks.block_tokens
        chain = DigestChain((*request.prompt, *request.output), size, request.salt, request.adapter)
        num_blocks = min(len(cells), len(chain.tokens) - 1) // size
        num_known, added = self.batcher.cache_prefix(chain, num_blocks)
        for at, block in enumerate(added, start=num_known):
            for offset in range(size):
                self.device.memory[block, offset] = cells[at * size + offset]
        self.batcher.check()
        return (num_known + len(added)) * size

    def step(self) -> StepPlan | None:
        """One turn of the live loop: plan ahead, then commit what came before."""
        if len(self.in_flight) >= self.batcher.max_in_flight:
            self.commit()
        is_idle, blocks = not self.in_flight, self.batcher.blocks
        plan = self.launch() if len(self.in_flight) < self.batcher.max_in_flight else None
        is_starved = blocks.num_blocks < blocks.floor_blocks
        assert plan or not is_idle or not self.live or is_starved, "nothing in flight and nothing to do"
        if len(self.in_flight) == self.batcher.max_in_flight or (plan is None and self.in_flight):
            if self.device.is_pipeline and self.ahead is None:
                self.plan_ahead()
            self.commit()
        return plan

    def drain(self) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while self.batcher.has_work:
            plan = self.step()
            plans += [plan] if plan is not None else []
            assert len(plans) < 10_000, "no progress"
        assert not self.live
        self.batcher.settle()
        assert self.batcher.blocks.num_available == self.batcher.blocks.num_blocks
        return plans

    def expected(self, request: EngineRequest) -> tuple[list[int], FinishReason | type[HearthError]]:
        """What the request yields when it has the device to itself, from the start."""
        guide = request.guide.afresh() if isinstance(request.guide, Alternating) else None
        capacity = self.batcher.request_limits.kv_tokens
        max_tokens = min(self.limits.max_context, capacity) - len(request.prompt)
        if request.sampling.max_tokens is not None:
            max_tokens = max(1, min(max_tokens, request.sampling.max_tokens))
        output: list[int] = []
        while len(output) < max_tokens:
            if self.device.nan_token in (*request.prompt, *output):
                return output, LogitsNotFinite
            mask = None if guide is None or guide.num_free else guide.mask
            output.append(next_token(request.salt, [*request.prompt, *output], mask, request.adapter))
            is_allowed = len(output) > request.sampling.min_tokens
            if output[-1] in request.sampling.stop_ids and is_allowed:
                return output, FinishReason.STOP
            try:
                if guide is not None and (reason := guide.take(output[-1])):
                    return output, reason
            except GuideStuck:
                if len(output) < max_tokens:
                    return output, GuideStuck
        return output, FinishReason.LENGTH


def _emissions(committed: CommittedStep) -> list[Emission]:
    columns = zip(committed.request_ids, committed.tokens, committed.sample_indices, strict=True)
    assert committed.finished.keys() <= set(committed.request_ids)
    return [
        Emission(request_id, token, index, committed.finished.get(request_id))
        for request_id, token, index in columns
    ]


def _ends(committed: CommittedStep) -> dict[RequestId, FinishReason | type[HearthError]]:
    failed = {one.request_id: type(one.error) for one in committed.failures}
    assert len(failed) == len(committed.failures), "a request failed twice"
    assert not failed.keys() & committed.finished.keys(), "a request ended twice"
    return committed.finished | failed


def loop(
    *,
    max_batch_tokens: int = 64,
    max_seqs: int = 8,
    max_context: int = 64,
    num_blocks: int = 65,
    block_tokens: int = 4,
    step_sizes: tuple[int, ...] = (),
    num_flights: int | None = None,
) -> Loop:
    limits = BatchLimits(max_batch_tokens, max_seqs, max_context, step_sizes)
    return Loop(limits, BlockBook.fixed(num_blocks, block_tokens), num_flights)


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int | None = 4,
    salt: bytes = b"",
    adapter: AdapterId | None = None,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(RequestId(name), tuple(prompt), params, salt, adapter=adapter)


def stopping(
    name: str, prompt: Sequence[int], at: int, max_tokens: int = 8, min_tokens: int = 0
) -> EngineRequest:
    """A request whose output number `at` (from 1) is a stop token."""
    output: list[int] = []
    for _ in range(at):
        output.append(next_token(b"", [*prompt, *output]))
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(output[-1],))
    return EngineRequest(RequestId(name), tuple(prompt), params)


def launched(engine: Loop) -> StepPlan:
    plan = engine.launch()
    assert plan is not None
    return plan


def names(plan: StepPlan) -> list[str]:
    return [str(row.request_id) for row in plan.rows]


#: Some begin alike; others are of so few tokens that they branch off each other again and again.
PROMPTS = st.builds(
    lambda shared, own: (5, 1, 4, 1, 5, 9, 2, 6)[:shared] + tuple(own),
    st.integers(0, 8),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
) | st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
STOP_IDS = st.sampled_from([(), (STOP,), (STOP, 7)])
PROMPT_LOGPROBS = st.sampled_from([None, None, 0, 2])
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(2, 12),
    min_tokens=st.integers(0, 2),
    stop_token_ids=STOP_IDS,
    prompt_logprobs=PROMPT_LOGPROBS,
) | st.builds(SamplingParams, max_tokens=st.just(0), stop_token_ids=STOP_IDS, prompt_logprobs=PROMPT_LOGPROBS)
POOLINGS = st.sampled_from([None, None, *Pooling])
SALTS = st.sampled_from([b"", b"", b"other"])
ADAPTERS = st.sampled_from([None, None, AdapterId("one"), AdapterId("two")])
#: How many that come later a request gives way to, as a batch request does.
LATE = st.sampled_from([0, 0, 4, 20])
GUIDES = st.none() | st.builds(
    Alternating,
    st.integers(1, 12),
    st.none() | st.integers(1, 12),
    num_free_first=st.just(0) | st.integers(1, 9),
)


class Driven(RuleBasedStateMachine):
    """The rules that all schedules have: arrivals, steps up to two ahead, commits and cancellations.

    Who inherits them makes the loop when it starts.
    """

    engine: Loop
    num_added: int

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        salt=SALTS,
        guide=GUIDES,
        late=LATE,
        pooling=POOLINGS,
        adapter=ADAPTERS,
        is_streamed=st.booleans(),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: bytes,
        guide: Alternating | None,
        late: int,
        pooling: Pooling | None,
        adapter: AdapterId | None,
        is_streamed: bool,
    ) -> None:
        guide, request_id = guide and guide.afresh(), RequestId(str(self.num_added))
        line_s, is_batch = float(self.num_added + late), late > 0
        self.engine.add(
            EngineRequest(
                request_id,
                prompt,
                sampling,
                salt,
                guide=guide,
                pooling=pooling,
                adapter=adapter,
                is_batch=is_batch,
                line_s=line_s,
                is_streamed=is_streamed,
            )
        )
        self.num_added += 1

    @rule(max_prompt_tokens=st.none() | st.integers(1, 12))
    def limit_prompts(self, max_prompt_tokens: int | None) -> None:
        self.engine.max_prompt_tokens = max_prompt_tokens

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.batcher.max_in_flight)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self.engine.commit()

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.engine.live))))
