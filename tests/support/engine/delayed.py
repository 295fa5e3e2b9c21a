"""A ledger that is late, as a GPU is: a launched step computes nothing until somebody waits for it.

What a step needs of the host is copied at its launch, as uploads are; what it reads and writes of the pool happens
only when it runs. So a block that is given away too soon shows: in a wrong token, or in somebody's spoilt KV.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.types.request import Batch, SampledToken
from tandem.values.ids import BlockId, RequestId
from tests.support.engine.ledger import LedgerRunner, Windows, next_token, windows_of


@dataclass(frozen=True, slots=True)
class _Row:
    request_id: RequestId
    table: tuple[BlockId, ...]
    windows: Windows
    start: int
    tokens: tuple[int | None, ...]
    """None: what the step before samples for the same request."""
    samples: bool
    drafts: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class DelayedStep:
    """Implements `engine.types.runner.LaunchedStep`."""

    runner: "DelayedRunner"
    batch: Batch
    rows: list[_Row]
    sampled: dict[RequestId, list[int]] = field(default_factory=dict)
    is_done: bool = False

    def is_over(self) -> bool:
        return self.runner.is_over(self)

    def tokens(self) -> Sequence[SampledToken | None]:
        self.runner.run_until(self)
        poisoned = self.runner.poisoned
        return [
            None if row.request_id in poisoned else SampledToken(token_id=token_id)
            for row in self.rows
            if row.samples
            for token_id in self.sampled[row.request_id]
        ]

    def blocks(self) -> set[BlockId]:
        """Everything that the step reads or writes."""
        moved = {copy.source for copy in self.batch.copies} | {copy.target for copy in self.batch.copies}
        moved |= {offload.source for offload in self.batch.offloads}
        tables = [row.table for row in self.rows]
        size, window = self.runner.block_size, self.runner.window or 0
        tables += [group[max(0, row.start + 1 - window) // size :] for row in self.rows for group in row.windows[1]]
        return moved | {load.target for load in self.batch.loads} | {block for table in tables for block in table}

    def written(self) -> set[BlockId]:
        """Everything that the step writes."""
        size = self.runner.block_size
        moved = {copy.target for copy in self.batch.copies} | {load.target for load in self.batch.loads}
        tables = [row.table for row in self.rows] + [group for row in self.rows for group in row.windows[1]]
        starts = [row.start for row in self.rows] + [row.start for row in self.rows for _ in row.windows[1]]
        return moved | {b for table, start in zip(tables, starts, strict=True) for b in table[start // size :]}


class DelayedRunner(LedgerRunner):
    """Implements `engine.types.runner.Runner`."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[DelayedStep] = deque()
        self.poisoned: set[RequestId] = set()
        """Requests whose logits are NaN."""
        self.num_fed = 0
        self._last: DelayedStep | None = None

    def launch(self, batch: Batch, _on_layers: object = None) -> DelayedStep:  # type: ignore[override]
        rows = []
        for request, start, num_tokens, samples, drafts in batch.items:
            end = start + num_tokens
            known = request.token_ids[start:end].tolist()
            assert not drafts or (len(known) == num_tokens == 1 and samples)
            assert len(known) == num_tokens or (num_tokens == 1 and start == len(request.token_ids))
            end += len(drafts)
            table = tuple(request.block_table)[: -(-end // self.block_size)]
            assert end <= len(table) * self.block_size
            tokens = tuple(known) or (None,)
            rows.append(_Row(request.request_id, table, windows_of(request), start, tokens, samples, drafts))
        step = DelayedStep(runner=self, batch=batch, rows=rows)
        self.pending.append(step)
        return step

    def is_over(self, step: DelayedStep) -> bool:
        return step.is_done

    def run_until(self, wanted: DelayedStep) -> None:
        """Steps run in order."""
        while not wanted.is_done:
            self._run(self.pending.popleft())

    def _run(self, step: DelayedStep) -> None:
        self.move(step.batch)
        for row in step.rows:
            state = self.read(row.table, row.start)[-1] if row.start else 7
            if row.start:
                self.check_windows(row.windows, row.table, row.start)
            for i, known in enumerate(row.tokens):
                token = known
                if token is None:
                    assert self._last is not None
                    (token,) = self._last.sampled[row.request_id]
                    self.num_fed += 1
                state = (state * 1_000_003 + token + 1) % (2**61 - 1)
                self.write(row.table, row.start + i, state)
                self.write_windows(row.windows, row.start + i, state)
            self.num_computed += len(row.tokens) + len(row.drafts)
            if row.samples:
                end = row.start + len(row.tokens)
                step.sampled[row.request_id] = [next_token(self.read(row.table, end))]
                for i, draft in enumerate(row.drafts):
                    state = (state * 1_000_003 + draft + 1) % (2**61 - 1)
                    self.write(row.table, end + i, state)
                    self.write_windows(row.windows, end + i, state)
                    step.sampled[row.request_id].append(next_token(self.read(row.table, end + i + 1)))
        step.is_done = True
        self._last = step
