"""What a fetch is made of, and what it is counted under."""

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
    """Hints that were not followed: held here already, cheaper to compute, or without room."""
    num_tokens: int = 0
    """Brought here, by those that failed midway too."""


class Declined(Enum):
    """Why a fetch is not begun."""

    HELD = "held"
    """All of it is here."""
    COMPUTED = "computed"
    """That costs less."""
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """What is to be brought, from whom, at which rates that is judged."""

    transfer_id: TransferId
    probe: Request
    """A prefix that is known by its names alone, and one token more, since a reservation leaves one to compute."""
    holder: PrefixHolder
    rates: FetchRates
    spare_blocks: int = 0
    """Available blocks that must be left."""
    trace: TraceContext | None = None
    asker: RequestId | None = None
    """Who wanted it first, if a request did."""

    @property
    def about(self) -> dict[str, str]:
        """For the log: whom it is for."""
        return {} if self.asker is None else about(self.asker)


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixFetch:
    """One fetch, from the request for room on; `ended` is set with the tokens gained."""

    wanted: FetchOrder
    stats: FetchStats
    num_held_tokens: int = 0
    """Known once room is reserved."""
    declined: Declined | None = None
    """Why it was not begun, when it has ended so."""
    num_waiting: int = 0
    """Who would have it; with the last of them it ends."""
    num_destinations: int = 0
    reserved: "asyncio.Future[None]" = field(default_factory=_future)
    """Done when room is reserved, or none will be."""
    ended: "asyncio.Future[int]" = field(default_factory=_future)

    def end(self, num_tokens: int) -> None:
        """It is over, once."""
        if not self.reserved.done():
            self.reserved.set_result(None)
        if not self.ended.done():
            self.ended.set_result(num_tokens)

    def decline(self, reason: Declined) -> None:
        """It is over before it began."""
        self.declined = reason
        self.end(0)


def probe_of(hash_root: BlockHash, names: Sequence[BlockHash], transfer_id: TransferId) -> Request:
    """A request that matches the named prefix and wants nothing else."""
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
    """The request to the holder."""
    wanted = fetch.wanted
    probe = wanted.probe
    return PrefillJob(
        transfer_id=wanted.transfer_id,
        request_id=wanted.asker or probe.request_id,
        token_ids=(),
        num_prompt_tokens=0,
        held_tokens=fetch.num_held_tokens,
        sampling=probe.params,
        hash_root=probe.hash_root,
        resume=True,
        fetch=True,
        names=tuple(probe.block_hashes),
        trace=wanted.trace,
    )


def route_to(holder: PrefixHolder) -> Route:
    return Route(worker_id=holder.worker_id, incarnation=holder.incarnation, address=holder.address, attempt=1)
