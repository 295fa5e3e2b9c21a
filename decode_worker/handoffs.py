"""The decode worker's side of hand-offs: maps the hub's events to the engine and the router.

Closures posted to the engine run in the order in which they were posted, and a reservation's end is always posted
before the hub can report its blocks quiet. A block is therefore released exactly once, however the events are
interleaved.
"""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from decode_worker.phase_times import entered, first_token_came, landed
from decode_worker.reports import StepReports
from decode_worker.task import DecodeTask, TaskPhase
from decode_worker.task_index import TaskIndex
from engine.kv_cache.reservations import ReservationGrant
from engine.scheduler.request_limits import finish_reason
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import FirstToken
from kv_transfer.session.receiver_hub import ReceiverHub
from tandem.errors import InvariantError, ServingError, TransferError, Unavailable
from tandem.telemetry.logs import about
from tandem.values.ids import BlockId, TransferId
from tandem.values.outputs import FinishReason
from worker.decisions.destinations import Destinations
from worker.engine_host import EngineHost

_log = logging.getLogger(__name__)


class HandoffReceiver:
    """Implements kv_transfer's ReceiverOwner over the engine. On the event loop's thread."""

    def __init__(
        self,
        host: EngineHost,
        tasks: TaskIndex,
        reports: StepReports,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        ask_for_route: Callable[[DecodeTask, ServingError], None],
        clock: Callable[[], float],
    ) -> None:
        self.hub: ReceiverHub | None = None
        self._host = host
        self._tasks = tasks
        self._reports = reports
        self._spawn = spawn
        self._ask = ask_for_route
        self._clock = clock
        self._destinations = Destinations()

    @property
    def num_destinations(self) -> int:
        """Number of blocks that a peer may be writing."""
        return len(self._destinations)

    # Calls of the worker

    def abandon(self, task: DecodeTask) -> None:
        """End a task before its commit: release the reservation once its writer is quiet."""
        key, engine_id = task.reservation, task.engine_id

        def give_up(scheduler: Scheduler) -> None:
            # A commit may have come first: then it is the engine's request.
            if not scheduler.abort(engine_id) and key is not None:
                scheduler.reservations.quarantine(key)

        self._host.post(give_up)
        if self.hub is not None and task.transfer_id is not None:
            # A turn later, because this may be inside one of the hub's own callbacks.
            asyncio.get_running_loop().call_soon(self.hub.cancel, task.transfer_id)

    # ReceiverOwner

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        """Choose the destination blocks, late: only when the prompt leaves the prefill worker's queue."""
        task = self._tasks.of_transfer(transfer_id)
        if task is None or task.reservation is None:
            raise TransferError("the request has ended")
        key = task.reservation
        blocks, windows = await self._host.call(lambda scheduler: scheduler.reservations.bind_all(key))
        if len(blocks) != num_blocks:
            raise InvariantError(f"{transfer_id}: {len(blocks)} blocks are reserved, but the hand-off has {num_blocks}")
        self._destinations.bind(key, blocks)
        if task.reservation == key:  # otherwise the attempt has failed meanwhile, and `released` returns these
            task.destinations = blocks
        return BlocksBound(blocks=blocks, windows=windows)

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        """Send the first token to the router at once; the KV follows."""
        task = self._tasks.of_transfer(transfer_id)
        if task is None:
            return
        token = task.first_token = first_token.token
        if task.cached_tokens is None:
            task.cached_tokens = first_token.cached_tokens
        first_token_came(task, first_token, self._clock())
        if task.span is not None:
            task.span.event("first_token", task.decoding_since_s)
        reason = self._ends_with(task.request, token.token_id)
        self._reports.token(task, task.request.num_output_tokens, token, reason)
        self._reports.send()
        if reason is not None:
            self._tasks.remove(task)
            self.abandon(task)

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        """Start the sequence: everything has landed and was verified."""
        task = self._tasks.of_transfer(transfer_id)
        first = info.first_token.token if info.first_token is not None else task.first_token if task else None
        if task is not None and task.reservation is not None and first is not None:
            key, token_id, cached = task.reservation, first.token_id, task.cached_tokens
            landed(task, info.times, self._clock())
            if task.route is not None:
                num_tokens = len(info.blocks) * self._host.parts.layout.block_size
                self._reports.committed(task, task.route, num_tokens=num_tokens, exposed_s=info.exposed_s)
            task.phase = TaskPhase.ENGINE
            cached_tokens = info.cached_tokens if cached is None else cached
            if task.span is not None:
                task.awaits_step_since_s = self._clock()
            try:
                await self._host.call(lambda s: s.reservations.commit(key, token_id, num_cached_tokens=cached_tokens))
            except ServingError as error:
                _log.info(
                    "%s ended while its KV was arriving: %s", transfer_id, error.message, extra=about(task.request_id)
                )
            else:
                entered(task, self._clock())
                self._destinations.settle(info.blocks)
                return
        self.released(transfer_id, info.blocks)

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        """Keep what landed, reserve the rest again under another key, and ask the router for another route."""
        task = self._tasks.of_transfer(transfer_id)
        if task is None or task.reservation is None:
            self.released(transfer_id, landed)
            return
        self._destinations.settle(landed)
        old = task.reservation
        task.phase = TaskPhase.REROUTING
        task.held_tokens += len(landed) * self._host.parts.layout.block_size
        writer_is_quiet = len(landed) == len(task.destinations)
        task.destinations = ()
        new, held_tokens = task.next_reservation(), task.held_tokens

        def reserve_again(scheduler: Scheduler) -> ReservationGrant | None:
            request = scheduler.reservations.salvage(old, held_tokens, writer_is_quiet=writer_is_quiet)
            try:
                return scheduler.reservations.reserve(new, request, max_held_tokens=held_tokens)
            except ServingError:
                return None  # the pool is full: the request can still queue and be computed here

        # Posted now: the hub may release the rest before this callback returns.
        self._spawn(self._ask_for_route(task, new, self._host.call(reserve_again), error))

    async def _ask_for_route(
        self, task: DecodeTask, new: TransferId, kept: Awaitable[ReservationGrant | None], why: ServingError
    ) -> None:
        try:
            grant = await kept
        except ServingError as error:
            _log.info(
                "%s: nothing that landed was kept: %s", task.transfer_id, error.message, extra=about(task.request_id)
            )
            return
        if grant is None and task.reservation == new:
            task.reservation = None
        if task.phase is TaskPhase.REROUTING:
            self._ask(task, why)

    def expired(self, transfer_id: TransferId) -> None:
        """Fail the request: the router named no other route in time."""
        task = self._tasks.of_transfer(transfer_id)
        if task is None:
            return
        error = Unavailable("no route for the prompt's KV was named in time", retry_after_s=1.0)
        self._reports.failure(task, error)
        self._reports.send()
        self._tasks.remove(task)
        self.abandon(task)

    def quarantine(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Log the quarantine, which the engine has begun already."""
        _log.warning(
            "%s: quarantined %d blocks, their writer may still be running",
            transfer_id,
            len(blocks),
            extra=about(transfer_id),
        )

    def released(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Release blocks that nothing writes any more."""
        for key in self._destinations.settle(blocks):
            self._host.post(_release(key))

    def _ends_with(self, request: Request, token_id: int) -> FinishReason | None:
        probe = Request(
            request_id=request.request_id,
            token_ids=array("i", [*request.token_ids, token_id]),
            num_prompt_tokens=request.num_prompt_tokens,
            params=request.params,
            hash_root=request.hash_root,
        )
        return finish_reason(probe, self._host.parts.config)


def _release(key: TransferId) -> Callable[[Scheduler], object]:
    return lambda scheduler: scheduler.reservations.release_quarantine(key)
