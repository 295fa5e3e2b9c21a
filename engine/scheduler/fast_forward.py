"""Fast-forwards runs of steps in which every running sequence gets one more token and nothing else happens.

A simulator spends its time on these (no worker uses this module): thousands of steps between two arrivals. Their effect
on tables, names and counts is known beforehand, so it is applied at once, in the order of single steps: in each step
blocks are allocated by rank, then those that were filled get their names. Nothing is decided here: a run ends before a
step that could admit, preempt or end a request, and the planner decides that step as usual.
"""

from array import array
from bisect import bisect_left
from typing import NamedTuple

from engine.kv_cache.block_manager import BlockManager
from engine.scheduler.request_table import RequestTable
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Request
from engine.types.step_output import StepOutput
from tandem.errors import InvariantError


class SteadyRun(NamedTuple):
    """A run of steps that may be taken at once, and the size of its first step."""

    num_steps: int
    num_rows: int
    """Sequences in each step."""
    num_context_tokens: int
    """Context tokens of all rows in the first step; each step adds `num_rows`."""


NO_RUN = SteadyRun(0, 0, 0)


class _Change(NamedTuple):
    """One block allocated or named during the run; sorts in the order of single steps."""

    step: int
    is_filled: bool
    """True: the step filled a block, which gets its name; False: a block is allocated before the step computes."""
    position: int
    """Position of the request among the running ones."""


class FastForwardScheduler(Scheduler):
    """A scheduler that can also take runs of steady steps at once, for simulations."""

    def steady_run(self) -> SteadyRun:
        """The run of steps that `fast_forward` may take at once."""
        if self._ahead or self.tiers is not None or self.offloading is not None or self._speculation is not None:
            return NO_RUN
        if self._config.windows is not None:  # whose blocks change hands in most steps
            return NO_RUN
        return _steady_run(self._table, self.blocks, self._config)

    def fast_forward(self, num_steps: int, token_id: int) -> StepOutput:
        """Apply `num_steps` steps of the present `steady_run`, at most all of them; all tokens are `token_id`.

        The output reports all that these steps would, except tokens. InvariantError for steps that would end a request.
        """
        if self._ahead:
            raise InvariantError("cannot fast-forward while a step is in flight")
        self._planner.skip_steps(num_steps)
        self._had_decodes = True
        _take_steps(num_steps, token_id, self._table, self.blocks)
        return self.drain()


def _steady_run(table: RequestTable, blocks: BlockManager, config: SchedulerConfig) -> SteadyRun:
    """The coming steps that are all alike; `NO_RUN` when the next one may differ. O(running requests).

    Only for a scheduler with no step under way and no tier below its pool.
    """
    running = table.running
    num_rows = len(running)
    if not num_rows or num_rows > min(config.max_running_requests, config.max_batched_tokens):
        return NO_RUN
    if len(table.waiting) and (num_rows < config.max_running_requests or len(table.deadlines)):
        return NO_RUN
    num_steps, num_tokens = config.max_sequence_tokens, 0
    for request in running:
        length = len(request.token_ids)
        rule = request.end_rule
        if length - request.num_computed_tokens != 1 or request.prefill_only or rule is None:
            return NO_RUN
        num_tokens += length
        left = rule.max_tokens - length - 1
        if left < num_steps:
            if left <= 0:
                return NO_RUN
            num_steps = left
    num_steps = _affordable(num_steps, table, blocks)
    return SteadyRun(num_steps, num_rows, num_tokens) if num_steps else NO_RUN


def _take_steps(num_steps: int, token_id: int, table: RequestTable, blocks: BlockManager) -> None:
    """Take steps of a `steady_run` in which all sample `token_id`. InvariantError if a sequence would end."""
    size = blocks.block_size
    running = list(table.running)
    starts = [len(request.token_ids) - 1 for request in running]
    changes: list[_Change] = []
    for position, (request, start) in enumerate(zip(running, starts, strict=True)):
        rule, end = request.end_rule, start + num_steps
        if rule is None or end + 1 >= rule.max_tokens or token_id in rule.token_ids:
            raise InvariantError(f"request {request.request_id} would end within a run of steady steps")
        # Step s, from 1, computes the token after the first `start + s - 1`.
        room = len(request.block_table.ids) * size
        if room < end:
            changes += [_Change(at + 1 - start, False, position) for at in range(room, end, size)]
        first = start - start % size + size
        if first <= end:
            changes += [_Change(at - start, True, position) for at in range(first, end + 1, size)]
    changes.sort()
    for step, is_filled, position in changes:
        request = running[position]
        if is_filled:
            _advance(request, starts[position] + step, token_id)
            displaced = blocks.index_computed(request, request.num_computed_tokens // size - 1)
            if displaced:
                blocks.release_after_use(request.request_id, displaced)
        else:
            blocks.grow(request, blocks.allocate(1))
    for request, start in zip(running, starts, strict=True):
        _advance(request, start + num_steps, token_id)
        request.token_ids.append(token_id)


def _advance(request: Request, num_computed_tokens: int, token_id: int) -> None:
    """Set the number of computed tokens, with no known token beyond them."""
    missing = num_computed_tokens - len(request.token_ids)
    if missing > 0:
        request.token_ids.extend(array("i", (token_id,)) * missing)
    request.num_computed_tokens = num_computed_tokens


def _affordable(num_steps: int, table: RequestTable, blocks: BlockManager) -> int:
    """Number of the steps for whose tokens blocks are available without a preemption."""
    available = blocks.num_available
    if len(table.running) * (num_steps // blocks.block_size + 1) <= available:
        return num_steps
    rows = [(len(request.token_ids) - 1, len(request.block_table.ids)) for request in table.running]

    def fits(count: int) -> bool:
        return sum(max(0, blocks.blocks_for(start + count) - held) for start, held in rows) <= available

    if fits(num_steps):
        return num_steps
    return bisect_left(range(1, num_steps + 1), True, key=lambda count: not fits(count))
