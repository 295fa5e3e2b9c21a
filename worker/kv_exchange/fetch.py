"""One fetch of a prefix from a peer: its order, its state and its counts."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engine.types.request import Request
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.peer import Route
from tandem.telemetry.logs import about
from tandem.telemetry.tracing import TraceContext
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, RequestId, TransferId
from tandem.values.prefix_holder import PrefixHolder
from tandem.values.sampling import SamplingParams
from worker.decisions.fetch_cost import FetchRates


@dataclass(slots=True, kw_only=True)
class FetchStats:
    """Counts of fetches since the worker started."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    declined: int = 0
    """Fetches not begun: held here already, cheaper to compute, or without room."""
    num_tokens: int = 0
    """Tokens fetched, including those of fetches that failed midway."""


class Declined(Enum):
    """Reason why a fetch was not begun."""

    HELD = "held"
    """The whole prefix is here."""
    COMPUTED = "computed"
    """Computing costs less."""
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """The prefix to fetch, its holder, and the rates by which the fetch is priced."""

    transfer_id: TransferId
    probe: Request
    """A request for the prefix by its block names, plus one token, since a reservation leaves one to compute."""
    holder: PrefixHolder
    rates: FetchRates
    spare_blocks: int = 0
    """Number of available blocks that must remain."""
    trace: TraceContext | None = None
    asker: RequestId | None = None
    """The first request that wanted the prefix, if any."""

    @property
    def about(self) -> dict[str, str]:
        """The `extra` of its log lines."""
        return {} if self.asker is None else about(self.asker)


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixFetch:
    """One fetch, from the request for room on; `ended` is set to the tokens gained."""

    order: FetchOrder
    stats: FetchStats
    num_held_tokens: int = 0
    """Tokens held here already; known once room is reserved."""
    declined: Declined | None = None
    """Reason why it was not begun; None if it was."""
    num_waiting: int = 0
    """Number of callers waiting for it; it ends with the last of them."""
    num_destinations: int = 0
    reserved: "asyncio.Future[None]" = field(default_factory=_future)
    """Done when room is reserved, or will not be."""
    ended: "asyncio.Future[int]" = field(default_factory=_future)

    def end(self, num_tokens: int) -> None:
        """End the fetch; only the first call counts."""
        if not self.reserved.done():
            self.reserved.set_result(None)
        if not self.ended.done():
            self.ended.set_result(num_tokens)

    def decline(self, reason: Declined) -> None:
        """End the fetch before it has begun."""
        self.declined = reason
        self.end(0)


def probe_of(hash_root: BlockHash, names: Sequence[BlockHash], transfer_id: TransferId) -> Request:
    """A request that matches the named prefix and nothing else."""
    num_tokens = len(names) * HASH_BLOCK_TOKENS + 1
    return Request(
        request_id=RequestId(transfer_id),
        token_ids=array("i", bytes(4 * num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(max_tokens=1),
        hash_root=hash_root,
        prefill_only=True,
        block_hashes=list(names),
    )


def job_of(fetch: PrefixFetch) -> PrefillJob:
    """The job for the holder."""
    order = fetch.order
    probe = order.probe
    return PrefillJob(
        transfer_id=order.transfer_id,
        request_id=order.asker or probe.request_id,
        token_ids=(),
        num_prompt_tokens=0,
        held_tokens=fetch.num_held_tokens,
        sampling=probe.params,
        hash_root=probe.hash_root,
        resume=True,
        fetch=True,
        names=tuple(probe.block_hashes),
        trace=order.trace,
    )


def route_to(holder: PrefixHolder) -> Route:
    return Route(worker_id=holder.worker_id, incarnation=holder.incarnation, address=holder.address, attempt=1)
