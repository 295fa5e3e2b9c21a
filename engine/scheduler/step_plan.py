"""Builds a batch: the remaining budgets, the requests that have a share, and the blocks to move first."""

from collections.abc import Sequence

from engine.scheduler.chunk_size import has_decodes
from engine.types.block_moves import BlockCopy, BlockLoad, BlockOffload
from engine.types.request import Batch, BatchItem, Request
from tandem.errors import InvariantError
from tandem.values.ids import RequestId


class StepPlan:
    """Budgets of one step; a request has at most one share.

    `tokens_left` and `rows_left` bound all requests, `chunk_left` only those that are more than one token behind.
    """

    __slots__ = ("_copies", "_items", "_loads", "_moving", "chunk_left", "has_preempted", "rows_left", "tokens_left")

    def __init__(self, *, max_tokens: int, max_rows: int, chunk_tokens: int) -> None:
        self.tokens_left = max_tokens
        self.rows_left = max_rows
        self.chunk_left = chunk_tokens
        self.has_preempted = False
        self._items: list[BatchItem] = []
        self._loads: list[BlockLoad] = []
        self._copies: list[BlockCopy] = []
        self._moving: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> Sequence[BatchItem]:
        """The shares so far."""
        return self._items

    @property
    def has_decodes(self) -> bool:
        """Whether the plan so far has decodes; O(1), since they are planned first."""
        return has_decodes(self._items)

    def bound_chunk(self, num_tokens: int) -> None:
        """Limit the tokens for requests that are more than one behind."""
        self.chunk_left = min(self.chunk_left, num_tokens)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request this many tokens behind could get a share."""
        return self.tokens_left > 0 and self.rows_left > 0 and (num_tokens == 1 or self.chunk_left > 0)

    def add_token(self, request: Request) -> None:
        """Schedule the one token of a request that is one behind."""
        self._items.append(BatchItem(request, request.num_computed_tokens + request.num_in_flight_tokens, 1, True))
        self.tokens_left -= 1
        self.rows_left -= 1

    def add(self, request: Request, *, most: int | None = None) -> int:
        """Schedule as many of the request's next tokens as the budgets allow, and at most `most`. Returns how many."""
        gap = request.num_unplanned_tokens
        if gap == 1:
            self.add_token(request)
            return 1
        num_tokens = min(gap, self.chunk_left, self.tokens_left)
        if most is not None:
            num_tokens = min(num_tokens, most)
        self._items.append(BatchItem(request, request.num_planned_tokens, num_tokens, num_tokens == gap))
        self.chunk_left -= num_tokens
        self.tokens_left -= num_tokens
        self.rows_left -= 1
        return num_tokens

    def add_drafts(self, place: int, drafts: tuple[int, ...]) -> None:
        """Let the share at this place verify drafts too. Shares with drafts are not dropped again."""
        self._items[place] = self._items[place]._replace(drafts=drafts)
        self.tokens_left -= len(drafts)

    def move(self, request: Request, *, loads: list[BlockLoad], copies: list[BlockCopy]) -> None:
        """Fill some of a newcomer's blocks before the step computes."""
        self._loads += loads
        self._copies += copies
        self._moving.add(request.request_id)

    def drop(self, request: Request) -> None:
        """Withdraw the request's share, if it has one. Raises InvariantError for a newcomer whose blocks are not
        filled: preempting it would save content that does not exist.
        """
        if request.request_id in self._moving:
            raise InvariantError(f"request {request.request_id} was admitted and preempted in one step")
        for i, item in enumerate(self._items):
            if item.request is request:
                del self._items[i]
                self.tokens_left += item.num_tokens
                self.rows_left += 1
                if item.num_tokens > 1 or not item.samples:
                    self.chunk_left += item.num_tokens
                return

    def batch(self, preempted: tuple[BlockOffload, ...] = (), demoted: tuple[BlockOffload, ...] = ()) -> Batch:
        """Return the finished batch, with offloads of preempted requests and of the evicted blocks that it reuses."""
        return Batch(
            items=tuple(self._items),
            offloads=preempted + demoted,
            loads=tuple(self._loads),
            copies=tuple(self._copies),
            # The request that took a block over may have been preempted later in the same plan.
            saves_free_blocks=bool(preempted) or (self.has_preempted and bool(demoted)),
        )
