"""Counts of each token in each running request, kept on the logits' device, from which penalties are computed.

A row of counts is filled once, from the tokens that the host knows; after that, sampled tokens are counted
as they are sampled. So a penalty never waits for a token to travel to the host and back.

Where drafts are verified (`engine.speculation`), a request has several rows, of which the later ones count its drafts
beside what it has: sparsely, since nobody knows yet which drafts it will keep. Only its first row's token is counted;
the others are made up for when the request is next sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types.request import Request
from tandem.errors import InvariantError

Put = Callable[[NDArray[Any]], Tensor]
"""Copies a host array to the device."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenCounts:
    """Tokens in each running request: bit 0: in its prompt; the other bits: number of times in its output."""

    counts: Tensor  # int32 [num_slots, vocab_size]

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, device: torch.device | str) -> "TokenCounts":
        """Allocate zeroed counts: four bytes for each request that may run at once and token of the vocabulary."""
        return cls(counts=torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device))

    def restart(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Fill a slot for a request from int64 token ids: of its prompt, and of its output so far."""
        row = self.counts[slot].zero_()
        row.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
        row[prompt] |= 1

    def add(self, slot: int, output: Tensor) -> None:
        """Count int64 token ids of an output in its slot."""
        self.counts[slot].index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Penalties:
    """Penalties of each row; see `engine.sampling.sampler`. Each chosen token is counted in `counts` at once, except in
    rows with drafts before them.
    """

    counts: TokenCounts
    slots: Tensor  # int32 [num_rows], row of `counts`; negative: the row has none
    repetition: Tensor  # float32 [num_rows], 1 is off
    presence: Tensor  # float32 [num_rows], 0 is off
    frequency: Tensor  # float32 [num_rows], 0 is off
    drafts: Tensor | None = None  # int64 [num_rows, most], drafts before the row, which count as output; negative: none

    def seen(self, rows: Tensor) -> Tensor:
        """Copy the counts of these rows, int64, drafts included: int32 `[num_seen, vocab_size]`."""
        found = self.counts.counts[self.slots[rows].long()]
        if self.drafts is not None:
            drafts = self.drafts[rows]
            twos = torch.where(drafts >= 0, 2, 0).to(torch.int32)
            found.scatter_add_(1, drafts.clamp(min=0), twos)
        return found

    def is_counted(self) -> Tensor:
        """Whether the chosen token of each row is to be counted, bool `[num_rows]`."""
        counted = self.slots >= 0
        return counted if self.drafts is None else counted & (self.drafts < 0).all(dim=1)


class _Counted(NamedTuple):
    slot: int
    num_tokens: int
    """Leading tokens of the request's sequence that have been counted."""


class CountedRequests:
    """Assigns rows of counts to the requests of each step. A request keeps its row until another needs it."""

    def __init__(self, vocab_size: int, device: torch.device, put: Put) -> None:
        self._vocab_size = vocab_size
        self._put = put
        self._device = device
        self._counted: dict[Request, _Counted] = {}
        self._free: list[int] = []
        self.counts = TokenCounts.allocate(0, vocab_size, device)

    def slots(
        self, rows: Sequence[tuple[Request, int, tuple[int, ...]] | None], keep: frozenset[Request]
    ) -> NDArray[np.int32]:
        """Slots for requests that are about to sample, each with its present length and the drafts in it; negative for
        None. Rows with drafts come after their request's row without.

        `keep`: requests of this step whose slots may not be taken. InvariantError when tokens that must be counted
        are not known here.
        """
        found = np.full(len(rows), -1, dtype=np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                request, num_tokens, drafts = row
                if drafts:
                    found[i] = self._counted[request].slot
                    continue
                found[i] = slot = self._slot(request, num_tokens, keep)
                self._counted[request] = _Counted(slot, num_tokens + 1)
        return found

    def _slot(self, request: Request, num_tokens: int, keep: frozenset[Request]) -> int:
        counted = self._counted.get(request)
        if counted is not None and counted.num_tokens == num_tokens:
            return counted.slot
        if num_tokens > len(request.token_ids):
            raise InvariantError(f"request {request.request_id}: tokens to be counted are not known")
        prompt = request.num_prompt_tokens
        if counted is not None and prompt <= counted.num_tokens < num_tokens:
            # Drafts that were kept.
            fresh = np.array(request.token_ids[counted.num_tokens : num_tokens], dtype=np.int64)
            self.counts.add(counted.slot, self._put(fresh))
            return counted.slot
        slot = self._take(keep) if counted is None else counted.slot
        ids = np.array(request.token_ids[:num_tokens], dtype=np.int64)
        self.counts.restart(slot, self._put(ids[:prompt]), self._put(ids[prompt:]))
        return slot

    def _take(self, keep: frozenset[Request]) -> int:
        if not self._free:
            gone = [request for request in self._counted if request not in keep]
            self._free = [self._counted.pop(request).slot for request in gone]
        if not self._free:
            old = self.counts.counts
            more = torch.zeros(max(1, len(old)), self._vocab_size, dtype=torch.int32, device=self._device)
            self.counts = TokenCounts(counts=torch.cat((old, more)))
            self._free = list(range(len(old), len(old) + len(more)))
        return self._free.pop()
