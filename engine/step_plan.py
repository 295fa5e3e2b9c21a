"""A batch in the making: what is left of the step's budgets, and who has a share."""

from engine.request import Batch, BatchItem, Request
from tandem.ids import RequestId


class StepPlan:
    """Budgets of one step; a request has at most one share."""

    __slots__ = ("_chunk_tokens", "_items", "_rows_left", "_tokens_left", "has_preempted")

    def __init__(self, *, max_tokens: int, max_rows: int, chunk_tokens: int) -> None:
        self._tokens_left = max_tokens
        self._rows_left = max_rows
        self._chunk_tokens = chunk_tokens
        self._items: dict[RequestId, BatchItem] = {}
        self.has_preempted = False

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, spare: int = 0) -> bool:
        """Whether a share of one token fits and leaves `spare` such shares for others."""
        return self._tokens_left > spare and self._rows_left > spare

    def add(self, request: Request) -> None:
        """Give a request as many of its next tokens as its chunk and the budget allow."""
        num_tokens = min(request.num_uncomputed_tokens, self._chunk_tokens, self._tokens_left)
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens
        item = BatchItem(request=request, start=start, num_tokens=num_tokens, samples=samples)
        self._items[request.request_id] = item
        self._tokens_left -= num_tokens
        self._rows_left -= 1

    def drop(self, request: Request) -> None:
        """Take a share back, if the request has one."""
        item = self._items.pop(request.request_id, None)
        if item is not None:
            self._tokens_left += item.num_tokens
            self._rows_left += 1

    def batch(self) -> Batch | None:
        """The finished batch; None when nobody has a share."""
        return Batch(items=tuple(self._items.values())) if self._items else None
