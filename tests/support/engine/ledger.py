"""A runner without a model, whose every token depends on every KV entry that attention would read.

The "KV" of a token is a number derived from all tokens up to it. A sampled token is a digest over the whole KV of
its request, read through the block table: a block that is reused, lost, mixed up or never written changes the
output, which `continuation` predicts from the tokens alone.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from engine.scheduler.scheduler import Scheduler
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.config import SchedulerConfig
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import Batch, Request, SampledToken, TokenLogprob
from engine.types.tier_counts import Traffic
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import BlockId, RequestId
from tandem.values.sampling import SamplingParams

VOCAB = 97
EOS = 96
BLOCK = 16
SECRET = b"test"
ROOT = root_hash(secret=SECRET, model_fingerprint="ledger")

CONFIG = SchedulerConfig(
    num_blocks=24,
    block_size=BLOCK,
    max_model_len=200,
    max_batched_tokens=48,
    prefill_chunk_tokens=20,
    max_step_s=None,
    max_running_requests=6,
    max_waiting_requests=100,
    kv_event_capacity=10_000,
    eos_token_ids=frozenset({EOS}),
    eviction="lru",
    max_overtakes=8,
    priority_aging_s=None,
)


def config(**changes: Any) -> SchedulerConfig:
    return replace(CONFIG, **changes)


def scheduler(**changes: Any) -> Scheduler:
    return Scheduler(config(**changes), BlockHasher(SECRET))


def kv_of(tokens: Sequence[int]) -> list[int]:
    """KV entry of every token."""
    entries, state = [], 7
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        entries.append(state)
    return entries


def next_token(entries: Sequence[int]) -> int:
    return hash(tuple(entries)) % VOCAB


def continuation(prompt: Sequence[int], params: SamplingParams, limit: int = CONFIG.max_model_len) -> list[int]:
    """What must come out, by direct recursion."""
    tokens = list(prompt)
    output: list[int] = []
    while True:
        token = next_token(kv_of(tokens))
        tokens.append(token)
        output.append(token)
        stops = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            return output
        if len(output) >= params.max_tokens or len(tokens) >= limit:
            return output


class Crawl:
    """A pace slower than any machine's: beside decodes so few prompt tokens a step. Stands in for `ChunkSizer`."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def chunk_tokens(self) -> int:
        return self._num_tokens


class Done:
    """A step that was over when it was launched. Implements `engine.types.runner.LaunchedStep`."""

    def __init__(self, tokens: Sequence[SampledToken | None]) -> None:
        self._tokens = tokens

    def is_over(self) -> bool:
        return True

    def tokens(self) -> Sequence[SampledToken | None]:
        return self._tokens


class LedgerRunner:
    """Memory of (block, slot) -> entry. Implements `engine.types.runner.Runner`."""

    def __init__(self, block_size: int = BLOCK, window: int | None = None) -> None:
        """`window`: latest tokens whose entries the requests' windows must hold too, if they have any."""
        self.block_size = block_size
        self.window = window
        self.memory: dict[tuple[int, int], int | None] = {}
        self.host: dict[int, list[int | None]] = {}
        self.num_computed = 0

    def bind_thread(self) -> None:
        pass

    def launch(self, batch: Batch, _on_layers: object = None) -> Done:
        return Done(self.execute(batch))

    def execute(self, batch: Batch) -> list[SampledToken]:
        sampled = []
        self.move(batch)
        for item in batch.items:
            request, end = item.request, item.start + item.num_tokens
            state = self.read(request.block_table, item.start)[-1] if item.start else 7
            windows = windows_of(request)
            if item.start:
                self.check_windows(windows, request.block_table, item.start)
            for position in range(item.start, end):
                state = (state * 1_000_003 + request.token_ids[position] + 1) % (2**61 - 1)
                self.write(request.block_table, position, state)
                self.write_windows(windows, position, state)
            self.num_computed += item.num_tokens
            if request.scoring is not None:
                score(request, request.scoring, item.start, item.num_tokens)
            if item.samples:
                sampled.append(self.sample(request, end))
            for i, draft in enumerate(item.drafts):
                state = (state * 1_000_003 + draft + 1) % (2**61 - 1)
                self.write(request.block_table, end + i, state)
                self.write_windows(windows, end + i, state)
                self.num_computed += 1
                sampled.append(self.sample(request, end + i + 1))
        return sampled

    def sample(self, request: Request, num_tokens: int) -> SampledToken:
        self.check_windows(windows_of(request), request.block_table, num_tokens)
        token_id = next_token(self.read(request.block_table, num_tokens))
        # Of no distribution: who asks for alternatives gets the first tokens.
        top = [TokenLogprob(token_id=i, logprob=-float(i)) for i in range(request.params.num_logprobs or 0)]
        return SampledToken(token_id=token_id, top_logprobs=tuple(top))

    def move(self, batch: Batch) -> None:
        """Offloads, loads, copies. What is not there is moved as nothing, so that reading it fails."""
        places = [*batch.offloads, *batch.loads, *batch.copies]
        assert len({move.slot for move in batch.offloads}) == len(batch.offloads)
        assert len({move.target for move in places[len(batch.offloads) :]}) == len(places) - len(batch.offloads)
        for move in batch.offloads:
            self.host[move.slot] = [self.memory.get((move.source, i)) for i in range(self.block_size)]
        for move in batch.loads:
            for i, entry in enumerate(self.host[move.slot]):
                self.memory[move.target, i] = entry
        for move in batch.copies:
            for i in range(self.block_size):
                self.memory[move.target, i] = self.memory.get((move.source, i))

    traffic = Traffic()

    def move_now(self, offloads: Sequence[BlockOffload], loads: Sequence[BlockLoad]) -> None:
        self.move(Batch(items=(), offloads=tuple(offloads), loads=tuple(loads)))

    def read(self, blocks: Sequence[BlockId], num_tokens: int) -> list[int]:
        size = self.block_size
        return [self.memory[blocks[p // size], p % size] for p in range(num_tokens)]

    def write(self, blocks: Sequence[BlockId], position: int, entry: int) -> None:
        self.memory[blocks[position // self.block_size], position % self.block_size] = entry

    def write_windows(self, windows: "Windows", position: int, entry: int) -> None:
        """Write a token's entry, marked by its group, into a request's windows."""
        first, groups = windows
        assert first <= position // self.block_size, "written before the window"
        for group, blocks in enumerate(groups):
            self.write(blocks, position, entry * 8 + group)

    def check_windows(self, windows: "Windows", blocks: Sequence[BlockId], num_tokens: int) -> None:
        """Compare the windows of the token after `num_tokens` with the entries of all tokens, which `blocks` have."""
        if self.window is None:
            return
        first, groups = windows
        begin = max(0, num_tokens + 1 - self.window)
        entries = self.read(blocks, num_tokens)
        assert groups, "a request without windows"
        assert first <= begin // self.block_size, "read before the window"
        for group, held in enumerate(groups):
            for position in range(begin, num_tokens):
                block = held[position // self.block_size]
                assert self.memory[block, position % self.block_size] == entries[position] * 8 + group

    def write_range(self, blocks: Sequence[BlockId], tokens: Sequence[int], start: int, end: int) -> None:
        """What a transport does: correct entries of tokens [start, end) into the table's blocks."""
        entries = kv_of(tokens)
        for position in range(start, end):
            self.write(blocks, position, entries[position])


Windows = tuple[int, Sequence[Sequence[BlockId]]]
"""First token block that the windows of a request hold, and their tables by group."""


def windows_of(request: Request) -> Windows:
    """A copy of a request's windows; without groups where it has none."""
    table = request.windows
    return (0, ()) if table is None else (table.first, tuple(tuple(group) for group in table.groups))


def score(request: Request, scoring: PromptScoringState, start: int, num_tokens: int) -> None:
    """Figures that tell where in which prompt they were scored."""
    for position in scoring.rows(start, num_tokens):
        token = request.token_ids[position]
        if scoring.num_top is None:
            vectors = [float(token), float(position)]
            scoring.pool(1, [(place, vectors) for place, rows in scoring.pooled_rows(position, 1) if rows])
        elif scoring.label_token_ids:
            labels = scoring.label_token_ids
            found = {"logprobs": [-float(label) for label in labels], "ranks": [1] * len(labels)}
            scoring.scored(len(labels), **found, top_ids=[], top_logprobs=[])
        else:
            top = range(scoring.num_top)
            own = -float(request.token_ids[position + 1])
            scoring.scored(
                1, logprobs=[own], ranks=[position + 1], top_ids=list(top), top_logprobs=[-float(i) for i in top]
            )


_ids = count()


def request(
    prompt: Sequence[int],
    *,
    request_id: str | None = None,
    output: Sequence[int] = (),
    prefill_only: bool = False,
    priority: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    params: SamplingParams | None = None,
) -> Request:
    return Request(
        request_id=RequestId(request_id or f"r{next(_ids):06}"),
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        params=params or SamplingParams(max_tokens=8, ignore_eos=True),
        hash_root=ROOT,
        prefill_only=prefill_only,
        priority=priority,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def run(sched: Scheduler, runner: LedgerRunner, max_steps: int = 10_000) -> dict[RequestId, list[int]]:
    """Step until nothing can run; return the sampled tokens by request."""
    sampled: dict[RequestId, list[int]] = {}
    for _ in range(max_steps):
        batch = sched.schedule(0.0)
        if batch is None:
            break
        for event in sched.commit(batch, runner.execute(batch)).events:
            tokens = sampled.setdefault(event.request_id, [])
            if event.token is not None:
                tokens.append(event.token.token_id)
    else:
        raise AssertionError("the scheduler never came to rest")
    sched.check_invariants()
    return sampled


def assert_empty(sched: Scheduler) -> None:
    """Every block free or merely cached, every count zero."""
    sched.check_invariants()
    load = sched.load()
    assert load.num_used_blocks == load.num_promised_blocks == load.num_quarantined_blocks == 0
    assert load.num_running == load.num_waiting == load.num_held == load.num_reservations == 0
    assert load.num_backlog_tokens == 0
    assert sched.blocks.pool.num_free + load.num_evictable_blocks == load.num_blocks
