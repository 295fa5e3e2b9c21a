"""Tracks the steps that are launched and not settled yet.

While a step runs, the next one may be planned: each request that samples is taken to get one more token, whose id the
device will fill in. A request counts its tokens under way separately (`num_in_flight_tokens`, `num_awaited_tokens`), so
that its computed and known tokens stay as they are. Steps settle in the order of their launches; the block references
that wait for them are `engine.kv_cache.pool.StepHolds`.
"""

from collections import deque

from engine.types.request import Batch, Request
from tandem.errors import InvariantError
from tandem.values.ids import BlockId


class Lookahead:
    """The launched steps of one scheduler, oldest first."""

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def launch(self, batch: Batch) -> None:
        """Record a launched batch: from now on its requests are planned as if it were done."""
        self._batches.append(batch)
        for request, _, num_tokens, samples, _ in batch.items:
            request.num_in_flight_tokens += num_tokens
            if samples:
                request.num_awaited_tokens += 1
        if batch.num_draft_tokens:
            for item in batch.items:
                item.request.num_in_flight_drafts += len(item.drafts)

    def settle(self, batch: Batch) -> None:
        """Settle the batch. InvariantError unless it is the oldest."""
        if not self._batches or self._batches[0] is not batch:
            raise InvariantError("only the oldest launched step may be committed")
        self._batches.popleft()

    def arriving(self) -> set[BlockId]:
        """Blocks that a launched step fills before it computes. Later steps may already use them by name; readers
        outside the steps find their content only once the step has settled.
        """
        loaded = {load.target for batch in self._batches for load in batch.loads}
        return loaded | {copy.target for batch in self._batches for copy in batch.copies}

    def check_invariants(self) -> None:
        """Raise InvariantError unless requests count exactly the launched tokens; O(rows), for tests and audits."""
        expected: dict[Request, tuple[int, int, int]] = {}
        for batch in self._batches:
            for request, start, num_tokens, samples, drafts in batch.items:
                computing, awaited, verifying = expected.get(request, (0, 0, 0))
                if start != request.num_computed_tokens + computing and request.finish_reason is None:
                    raise InvariantError(f"request {request.request_id}: a launched step does not continue its tokens")
                expected[request] = (computing + num_tokens, awaited + samples, verifying + len(drafts))
        for request, counts in expected.items():
            found = (request.num_in_flight_tokens, request.num_awaited_tokens, request.num_in_flight_drafts)
            if found != counts:
                raise InvariantError(f"request {request.request_id}: num_in_flight_tokens disagrees with the steps")


def ends_lookahead(request: Request) -> bool:
    """Whether nothing may be planned behind a token that is being sampled: it is certainly the request's last, or the
    choice of the next one depends on it, or drafts are being verified, of which any number may be kept.
    """
    if not request.num_awaited_tokens:
        return False
    if request.prefill_only or request.guide is not None or request.num_in_flight_drafts:
        return True
    rule = request.end_rule
    return rule is not None and len(request.token_ids) + request.num_awaited_tokens >= rule.max_tokens
