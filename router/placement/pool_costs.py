"""The costs of one decision, worker by worker, and their explanation, which is built when it is read. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import overload

import numpy as np
from msgspec import Struct

from router.placement.costs import CandidateCost, local_threshold
from router.workers.columns import Bools, Floats, PoolMembers

Column = Floats | list[float]
"""One quantity of every worker of a pool: a list where they are few, an array where they are many."""
Flags = Bools | list[bool]


class PoolCosts(Struct, kw_only=True):
    """Costs that one decision compares. Columns are [num_workers], and belong to this decision alone."""

    held: Column
    """Leading tokens that the worker need not compute."""
    work: Column
    """Tokens that it would compute, including what their context adds."""
    compute_ms: Column
    """Time to compute them."""
    load: Column
    """The part of the cost that is the worker's load alone."""
    total: Column
    """Total cost; infinite for workers that may not be chosen."""
    explain: "Callable[[], ExplainedCosts]"
    """Splits the costs into their terms."""
    transfer_ms: Column | None = None
    """Time in which KV gets to each decode worker over its usual link; None: prefill workers,
    or those of a cluster without a prefill pool."""
    local: Flags | None = None
    """Whether each decode worker would compute the prompt itself; None: as above, and all do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedCosts:
    """The costs of one pool, term by term."""

    members: PoolMembers
    held: Floats
    total: Column
    terms: Mapping[str, Floats]

    def candidate(self, row: int) -> CandidateCost:
        info = self.members.infos[row]
        return CandidateCost(
            key=info.key,
            role=info.role,
            matched_tokens=int(self.held[row]),
            local_threshold_tokens=self.local_threshold(row),
            **{name: float(column[row]) for name, column in self.terms_of(row).items()},
        )

    def local_threshold(self, row: int) -> float | None:
        return None

    def terms_of(self, row: int) -> Mapping[str, Floats]:
        """Return the cost terms that apply to one worker."""
        return self.terms


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedDecodeCosts(ExplainedCosts):
    """The costs of decode workers, each with the cheaper of local prefill and a hand-off."""

    local: Flags
    """Whether each worker would compute the prompt itself."""
    local_terms: Mapping[str, Floats]
    """Terms of workers that compute it themselves."""
    remote_terms: Mapping[str, Floats]
    """Terms of workers that would have it handed over."""
    num_tokens: int
    floor_tokens: int
    """`CostModel.local_prefill_tokens`."""
    most_tokens: int | None
    """`CostModel.max_local_prefill_tokens`."""

    def terms_of(self, row: int) -> Mapping[str, Floats]:
        """Return the cost terms that apply to one worker."""
        return {**self.terms, **(self.local_terms if self.local[row] else self.remote_terms)}

    def local_threshold(self, row: int) -> float | None:
        compute_ms, uncached = float(self.local_terms["compute_ms"][row]), float(self.num_tokens - self.held[row])
        transfer_ms = sum(float(self.remote_terms[name][row]) for name in ("transfer_ms", "pair_ms"))
        return local_threshold(
            queue_ms=float(self.local_terms["queue_ms"][row]),
            token_ms=(compute_ms + float(self.local_terms["stall_ms"][row])) / uncached,
            link_ms=transfer_ms / uncached,
            handoff_ms=float(self.remote_terms["handoff_ms"][row]),
            floor_tokens=self.floor_tokens,
            most_tokens=self.most_tokens,
        )


class CandidateCosts(Struct, frozen=True, eq=False):
    """The candidates of a pool: the chosen one first, then cheapest first. A sequence; built when accessed."""

    total: Column
    """See `PoolCosts`, of which the log of decisions need not keep more."""
    explain: Callable[[], ExplainedCosts]
    chosen: int | None
    """The row of the chosen one; None: none of the pool was chosen."""

    def __len__(self) -> int:
        return int((np.asarray(self.total) < inf).sum())

    @overload
    def __getitem__(self, index: int) -> CandidateCost: ...
    @overload
    def __getitem__(self, index: slice) -> list[CandidateCost]: ...
    def __getitem__(self, index: int | slice) -> CandidateCost | list[CandidateCost]:
        order: list[int] = np.argsort(self.total, kind="stable")[: len(self)].tolist()
        if self.chosen is not None:
            order.remove(self.chosen)
            order.insert(0, self.chosen)
        found, explained = order[index], self.explain()
        return explained.candidate(found) if isinstance(found, int) else [explained.candidate(row) for row in found]

    def __iter__(self) -> Iterator[CandidateCost]:
        return iter(self[:])
