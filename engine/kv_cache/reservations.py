"""Reserves blocks on the decode side for sequences whose KV another worker is computing.

Life of a reservation: `reserve` pins the cached prefix, including its part in host memory (a disk is not read:
the peer would wait), and promises blocks for the rest (credit early);
`bind` turns the promise into destination blocks when the prefill leaves its queue (blocks late); then one of

- `commit`: everything landed and verified, the sequence runs;
- `commit_partial`: the landed blocks become cache, the sequence waits and computes the rest here;
- `salvage`: the landed blocks become cache, the caller reserves again for another attempt;
- `cancel` or `quarantine`: nothing is kept.

Destinations whose writer is not proven quiet stay referenced under their transfer (quarantine) and are not reused
until `release_quarantine`, however the sequence ends. One key per attempt: a caller that
retries under one transfer id makes the attempt part of the key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv_cache.block_manager import BlockManager, PrefixMatch
from engine.kv_cache.pins import PrefixPins
from engine.kv_cache.tiers.cache import CacheTiers
from engine.kv_cache.tiers.promotion import promote_promised
from engine.types.request import Request
from tandem.errors import InvalidRequest, TransferError
from tandem.values.ids import BlockId, RequestId, TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationGrant:
    """Grant of a reservation: the cached prefix that it holds, and the number of blocks promised."""

    num_held_tokens: int
    """Tokens of the prefix whose KV is already here and need not be transferred."""
    num_blocks: int
    """Destination blocks that `bind` will return, for the tokens after the held prefix."""


@dataclass(slots=True, kw_only=True)
class _Reservation:
    request: Request
    grant: ReservationGrant
    num_held_blocks: int
    bound: tuple[BlockId, ...] | None = None
    num_destinations: int = 0
    """Blocks that a peer may write: those bound, and those of their windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quarantine:
    references: tuple[BlockId, ...]
    """All blocks of the reservation's table, since a referenced block's ancestors are referenced."""
    num_destinations: int


class Reservations:
    """Sequences that are being transferred to this worker, by transfer id."""

    def __init__(
        self,
        blocks: BlockManager,
        pins: PrefixPins,
        *,
        screen: Callable[[Request], None],
        adopt: Callable[[Request], None],
        tiers: CacheTiers | None = None,
    ) -> None:
        """`screen` raises when a request may not enter now; `adopt` takes over a request that is ready to run."""
        self._blocks = blocks
        self._pins = pins
        self._tiers = tiers
        self._screen = screen
        self._adopt = adopt
        self._reserved: dict[TransferId, _Reservation] = {}
        self._request_ids: set[RequestId] = set()
        self._quarantined: dict[TransferId, _Quarantine] = {}
        self.on_bound: Callable[[Sequence[BlockId]], object] = _ignore
        """Called with blocks that a peer may write from now on."""

    def __len__(self) -> int:
        return len(self._reserved)

    @property
    def num_quarantined_blocks(self) -> int:
        """Destination blocks kept from reuse because a peer may still write them."""
        return sum(q.num_destinations for q in self._quarantined.values())

    def has_request(self, request_id: RequestId) -> bool:
        """Whether the request has a reservation."""
        return request_id in self._request_ids

    def reserve(
        self, transfer_id: TransferId, request: Request, *, max_held_tokens: int | None = None
    ) -> ReservationGrant:
        """Admit or refuse a sequence; all of its known tokens are to be computed elsewhere.

        `max_held_tokens` bounds the held prefix to the length that an earlier attempt announced to its peer.

        Raises InvalidRequest, ContextLengthExceeded and RequestTooLarge (never possible), PoolExhausted (not now).
        """
        if transfer_id in self._reserved or transfer_id in self._quarantined or self.has_request(request.request_id):
            raise InvalidRequest(f"transfer {transfer_id} or its request already exists")
        self._screen(request)
        match = self._blocks.match(request, max_tokens=max_held_tokens, is_computed_elsewhere=True)
        if match.cost > self._blocks.num_available:
            found = self._blocks.found(request, match)
            self._pins.make_way(match.num_total, found)
            # Blocks of its prefix that only a pin kept count as evictable now.
            match = self._blocks.match(request, max_tokens=max_held_tokens, is_computed_elsewhere=True)
        # One test for both, so that a refusal takes nothing; the promise that follows cannot fail.
        self._blocks.promise(match.cost)
        self._blocks.unpromise(match.num_parked + match.num_window_blocks)
        self._blocks.take_prefix(request, match)
        # An earlier attempt announced how much is held: hold no more now.
        num_loaded = self._bring_up(request, match) if max_held_tokens is None else 0
        if max_held_tokens is None:  # blocks of an earlier attempt were computed for this request: no cache hit
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        num_held = match.num_blocks + num_loaded
        grant = ReservationGrant(num_held_tokens=request.num_computed_tokens, num_blocks=match.num_missing - num_loaded)
        self._reserved[transfer_id] = _Reservation(request=request, grant=grant, num_held_blocks=num_held)
        self._request_ids.add(request.request_id)
        return grant

    def _bring_up(self, request: Request, match: PrefixMatch) -> int:
        """Extend a prefix just taken with promised blocks loaded from host memory. Returns their number."""
        if self._tiers is None:
            return 0
        count = self._tiers.num_loadable_blocks(request, match.num_blocks, between_steps=True)
        promote_promised(self._blocks, self._tiers, request, count)
        return count

    def bind(self, transfer_id: TransferId) -> tuple[BlockId, ...]:
        """Choose the promised destination blocks, in table order. Calling it again returns the same ones."""
        reservation = self._find(transfer_id)
        if reservation.bound is None:
            reservation.bound = tuple(self._blocks.allocate_promised(reservation.grant.num_blocks))
            self._blocks.grow(reservation.request, reservation.bound)
            sets = self._blocks.cover(reservation.request, reservation.request.num_tokens)
            destinations = (*reservation.bound, *(block for each in sets for block in each))
            reservation.num_destinations = len(destinations)
            self.on_bound(destinations)
        return reservation.bound

    def bind_all(self, transfer_id: TransferId) -> tuple[tuple[BlockId, ...], tuple[tuple[BlockId, ...], ...]]:
        """Like `bind`. Returns also the blocks of each group of windowed layers, in the same order: NO_BLOCK before the
        window.
        """
        bound = self.bind(transfer_id)
        table = self._find(transfer_id).request.windows
        if table is None:
            return bound, ()
        end = len(table)
        return bound, table.blocks(end - len(bound), end)

    def commit(self, transfer_id: TransferId, first_token: int, *, num_cached_tokens: int | None = None) -> None:
        """Start the sequence at `first_token`: all its KV has landed and been verified.

        `num_cached_tokens` is the prompt tokens that the prefill worker did not compute; None keeps the number found
        here. Raises TransferError for an unknown transfer, or one that was never bound.
        """
        reservation = self._find(transfer_id)
        if reservation.bound is None:
            raise TransferError(f"transfer {transfer_id} was committed before its blocks were bound")
        self._forget(transfer_id)
        request = reservation.request
        request.num_computed_tokens = request.num_tokens
        if num_cached_tokens is not None:
            request.num_cached_tokens = num_cached_tokens
        self._blocks.release(self._blocks.index_computed(request, reservation.num_held_blocks))
        request.token_ids.append(first_token)
        self._adopt(request)

    def commit_partial(
        self, transfer_id: TransferId, num_landed_tokens: int, *, first_token: int | None, writer_is_quiet: bool
    ) -> None:
        """Keep what landed and compute the rest here. `first_token`, if already sent, is never sampled again."""
        request = self.salvage(transfer_id, num_landed_tokens, writer_is_quiet=writer_is_quiet)
        if first_token is not None:
            request.token_ids.append(first_token)
        self._adopt(request)

    def salvage(self, transfer_id: TransferId, num_landed_tokens: int, *, writer_is_quiet: bool) -> Request:
        """End a reservation and keep its verified whole blocks as cache. Returns the request, which holds nothing.

        `num_landed_tokens` counts from the sequence's start and includes the held prefix. The blocks wait in the
        prefix index like any others: the request finds them by content when it is scheduled or reserved again.
        """
        reservation = self._forget(transfer_id)
        request = reservation.request
        displaced: list[BlockId] = []
        if reservation.bound is None:
            self._blocks.unpromise(reservation.grant.num_blocks)
        else:
            landed = min(num_landed_tokens, request.num_tokens)
            request.num_computed_tokens = max(landed, reservation.grant.num_held_tokens)
            displaced = self._blocks.index_computed(request, reservation.num_held_blocks)
        references = (*displaced, *self._blocks.take_table(request))
        request.num_computed_tokens = 0
        if reservation.bound is None or writer_is_quiet:
            self._blocks.release(references)
        else:
            num_destinations = reservation.num_destinations
            self._quarantined[transfer_id] = _Quarantine(references=references, num_destinations=num_destinations)
        return request

    def cancel(self, transfer_id: TransferId) -> Request:
        """Free everything at once. Only for a writer that is quiet or was never granted destinations."""
        return self.salvage(transfer_id, 0, writer_is_quiet=True)

    def quarantine(self, transfer_id: TransferId) -> Request:
        """End a reservation but keep its destinations from reuse: their writer may still be alive."""
        return self.salvage(transfer_id, 0, writer_is_quiet=False)

    def release_quarantine(self, transfer_id: TransferId) -> int:
        """Free destinations whose writer is proven quiet. Returns their number, 0 if there were none."""
        quarantine = self._quarantined.pop(transfer_id, None)
        if quarantine is None:
            return 0
        self._blocks.release(quarantine.references)
        return quarantine.num_destinations

    def _find(self, transfer_id: TransferId) -> _Reservation:
        reservation = self._reserved.get(transfer_id)
        if reservation is None:
            raise TransferError(f"transfer {transfer_id} has no reservation")
        return reservation

    def _forget(self, transfer_id: TransferId) -> _Reservation:
        reservation = self._find(transfer_id)
        del self._reserved[transfer_id]
        self._request_ids.remove(reservation.request.request_id)
        return reservation

    def references(self) -> list[BlockId]:
        """References that reservations and quarantines own, for audits."""
        held = [block for r in self._reserved.values() for block in self._blocks.held(r.request)]
        return held + [block for q in self._quarantined.values() for block in q.references]


def _ignore(_blocks: Sequence[BlockId]) -> None:
    """Default `on_bound`, for a pool in which all ranks see a peer's writes."""
