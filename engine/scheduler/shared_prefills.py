"""Finds prefills in progress by content, so that a common prefix is computed once, however its requests arrive.

The prefix index knows blocks that are full and computed. This knows the rest of the running requests' tokens as they
were at admission: their full blocks still to be computed, and the partly filled last one (the *tail*). A request whose
next block is being computed here waits for it; one that finds all full blocks, and its tail in another request, gets a
copy of that block. So the n choices of one request, which differ in nothing but their noise, compute one prompt.
The wait is bounded: it ends when the other request is no longer running, when the other made no progress in
`MAX_STALLS` steps, or when nothing else could run.
"""

from typing import NamedTuple

from engine.kv_cache.block_manager import BlockManager
from engine.types.request import Request, RequestState
from tandem.values.ids import BlockHash, RequestId

MAX_STALLS = 8

_Tail = tuple[BlockHash, bytes]
"""Name of the prefix before the block, and the block's tokens but the last known one, which is always computed."""


class _Share(NamedTuple):
    """The blocks by which one running request is found."""

    first_block: int
    end_block: int
    tail: _Tail | None


class _Wait(NamedTuple):
    """A waiting request's wait for another's progress."""

    num_computed_tokens: int
    """Computed tokens of the other request when it last advanced."""
    since_step: int


class MatchingTail(NamedTuple):
    """A block that holds all but the last of a request's known tokens beyond its full blocks."""

    source: Request
    """The request that has it."""
    block_index: int
    """Which of its token blocks it is."""
    num_tokens: int
    """Known tokens that need not be computed, from the sequence's start."""


class SharedPrefills:
    """Running requests by the content they compute. Costs O(blocks) per admission and nothing per step."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._shares: dict[RequestId, _Share] = {}
        self._computing: dict[BlockHash, Request] = {}
        self._tails: dict[_Tail, Request] = {}
        self._waits: dict[tuple[RequestId, RequestId], _Wait] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Begin a new step, by whose number waits are counted."""
        self._step += 1

    def skip_steps(self, num_steps: int) -> None:
        """Begin `num_steps` steps at once."""
        self._step += num_steps

    def enter(self, request: Request) -> None:
        """Record an admitted request, which computes the blocks that it has not found."""
        first = request.num_computed_tokens // self._blocks.block_size
        end = (request.num_tokens - 1) // self._blocks.block_size
        for i in range(first, end):
            self._computing.setdefault(self._blocks.name(request, i), request)
        tail = self._tail(request)
        if tail is not None:
            self._tails.setdefault(tail, request)
        self._shares[request.request_id] = _Share(first, end, tail)

    def leave(self, request: Request) -> None:
        """Forget a request that gives up its blocks."""
        share = self._shares.pop(request.request_id, None)
        if share is None:
            return
        for i in range(share.first_block, share.end_block):
            name = self._blocks.name(request, i)
            if self._computing.get(name) is request:
                del self._computing[name]
        if share.tail is not None and self._tails.get(share.tail) is request:
            del self._tails[share.tail]
        if self._waits:
            gone = request.request_id
            self._waits = {pair: wait for pair, wait in self._waits.items() if gone not in pair}

    def forget(self, request: Request) -> None:
        """Forget how long a request has waited, once it no longer waits."""
        if self._waits:
            gone = request.request_id
            self._waits = {pair: wait for pair, wait in self._waits.items() if pair[0] != gone}

    def must_wait(self, request: Request, num_found_blocks: int) -> bool:
        """Whether the request's next tokens are being computed by another that is worth waiting for.

        `num_found_blocks`: its prefix in the index. One of lower priority is not waited for: it may be held up.
        """
        other, needed = self._ahead(request, num_found_blocks)
        if other is None or other.num_computed_tokens >= needed or other.state is not RequestState.RUNNING:
            return False
        if other.priority > request.priority:
            return False
        pair = (request.request_id, other.request_id)
        wait = self._waits.get(pair)
        if wait is None or wait.num_computed_tokens < other.num_computed_tokens:
            self._waits[pair] = _Wait(other.num_computed_tokens, self._step)
            return True
        return self._step - wait.since_step < MAX_STALLS

    def matching_tail(self, request: Request, num_found_blocks: int) -> MatchingTail | None:
        """The block to copy instead of computing the request's tail again; None when no request has it."""
        if num_found_blocks < (request.num_tokens - 1) // self._blocks.block_size:
            return None
        other, needed = self._ahead(request, num_found_blocks)
        if other is None or other.num_computed_tokens < needed:
            return None
        if not self._blocks.may_fork(other, num_found_blocks):
            return None
        return MatchingTail(other, num_found_blocks, needed)

    def _ahead(self, request: Request, num_found_blocks: int) -> tuple[Request | None, int]:
        """The request that computes the next tokens, and the number of tokens it must have computed to provide them."""
        if num_found_blocks < (request.num_tokens - 1) // self._blocks.block_size:
            other = self._computing.get(self._blocks.name(request, num_found_blocks))
            return other, (num_found_blocks + 1) * self._blocks.block_size
        tail = self._tail(request)
        return (None if tail is None else self._tails.get(tail)), request.num_tokens - 1

    def _tail(self, request: Request) -> _Tail | None:
        num_full, rest = divmod(request.num_tokens - 1, self._blocks.block_size)
        if not rest:
            return None
        before = self._blocks.name(request, num_full - 1) if num_full else request.hash_root
        start = num_full * self._blocks.block_size
        return before, request.token_ids[start : start + rest].tobytes()
