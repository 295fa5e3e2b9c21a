"""The prefill worker: computes prompts for decode workers, while the hub sends their blocks.

Life of a task: job → engine queue → OFFER → chunks, each written to the decode worker while the next is computed →
first token → sealed → released. Its blocks stay pinned from the job to the release, even if the request fails.
"""

import logging
import time
from array import array
from dataclasses import dataclass, field

from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request, TokenEvent
from engine.types.step_output import LayersDone, PrefillProgress, StepOutput
from engine.types.token_guide import unusable
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.sender_hub import SenderHub
from tandem.errors import DeadlineExceeded, InvalidRequest
from tandem.protocol.wire import failure_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, FinishReason, PhaseTimes
from tandem.values.worker_identity import WorkerIdentity
from worker.drain import MigrationSource
from worker.engine_host import EngineHost
from worker.kv_exchange.service import Fabric
from worker.prefix_pins import PinService
from worker.prompt_logprobs import PromptScoringOrders
from worker.session_port import SessionPort
from worker.wire import hello_to_pb


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """A prompt being computed. Event loop only, but `request` belongs to the engine thread until it is computed."""

    job: PrefillJob
    request: Request
    blocks: list[BlockId] = field(default_factory=list)
    """Source blocks that have their final content, in the order of the request's table."""
    windows: list[list[BlockId]] = field(default_factory=list)
    """The same for each group of windowed layers, where these have blocks of their own."""
    queued_s: float = 0.0
    admitted_s: float = 0.0
    fetched_tokens: int = 0
    """Tokens fetched from a peer before the prompt was queued."""
    fetch_s: float = 0.0
    """Seconds that the fetch took."""
    cached: CachedTokens = NO_CACHED_TOKENS

    def times(self, now_s: float, *, block_bytes: int) -> PhaseTimes:
        """Phase times until `now_s`, and the KV held."""
        return PhaseTimes(
            prefill_queue_s=self.queued_s,
            prefill_s=now_s - self.admitted_s if self.admitted_s else 0.0,
            transfer_s=self.fetch_s,
            kv_byte_s=self.request.held.until(now_s) * block_bytes,
            cached=self.cached,
        )

    def tail_hash(self) -> BlockHash | None:
        """Name of the prompt's last full hash block; None when it is shorter than one."""
        return self.request.block_hashes[-1] if self.request.block_hashes else None


_log = logging.getLogger(__name__)


class PrefillWorker:
    """Handles sessions and owns the hand-offs' sources (SessionHandler, SenderOwner). On the event loop's thread."""

    def __init__(self, identity: WorkerIdentity, host: EngineHost) -> None:
        self.identity = identity
        self.fabric: Fabric | None = None
        self.migration_source: MigrationSource | None = None
        self._host = host
        self._pins = PinService(host)
        self._tasks: dict[TransferId, PrefillTask] = {}
        self._preparing: dict[TransferId, Request] = {}
        """Prompts that wait for what the engine needs of them: their adapter."""
        self._scoring = PromptScoringOrders(host, in_prefill_pool=True)

    # SessionHandler

    def hello(self) -> pb.WorkerHello:
        return hello_to_pb(self._host.parts, self.identity, self.fabric.transports if self.fabric else ())

    def opened(self, port: SessionPort) -> None:
        self._pins.opened(port)
        if port.wants_events:
            self._host.send_snapshot(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        """Handle an order: prompt scoring, migrations and pins. Generation is refused: it belongs to decode workers."""
        if self._scoring.handle(port, message):
            return
        if message.HasField("submit"):
            error = InvalidRequest("this is a prefill worker: submit to a decode worker")
            submit = message.submit
            refused = pb.Refused(request_id=submit.request_id, attempt=submit.attempt, failure=failure_to_pb(error))
            port.send(pb.WorkerMessage(refused=refused))
        elif message.HasField("fetch_cache") and self.fabric is not None:
            self.fabric.migration_target.migrate(port, message.fetch_cache)
        elif message.HasField("cache_offer_ended") and self.migration_source is not None:
            self.migration_source.migration_ended(port)
        elif message.HasField("resync"):
            self._host.send_snapshot(port)
        else:
            self._pins.order(port, message)

    def closed(self, port: SessionPort) -> None:
        """Handle a router's end; its prompts end with their decode workers."""
        self._scoring.closed(port)
        self._pins.closed(port)

    async def load(self) -> pb.LoadSnapshot:
        if self.fabric is not None:
            self._host.kv_bytes_per_s = self.fabric.receiver_hub.stats.bytes_per_s
        load = await self._host.load()
        if self.fabric is not None:
            load.transfers.CopyFrom(self.fabric.report())
        return load

    # SenderOwner

    async def submit(self, job: PrefillJob) -> None:
        """Queue a prompt. Raises ServingError when it is refused."""
        vocab_size = self._host.parts.model.vocab_size
        if max(job.token_ids) >= vocab_size:
            raise InvalidRequest(f"token_ids must be below the vocabulary's {vocab_size}", param="token_ids")
        job.sampling.validate(vocab_size=vocab_size)
        now_s = time.monotonic()
        request = Request(
            request_id=RequestId(job.transfer_id),
            token_ids=array("i", job.token_ids),
            num_prompt_tokens=job.num_prompt_tokens,
            params=job.sampling,
            hash_root=job.hash_root,
            choice_index=job.choice_index,
            arrival_s=now_s,
            priority=job.priority,
            deadline_s=None if job.timeout_s is None else now_s + job.timeout_s,
            prefill_only=True,
        )
        self._preparing[job.transfer_id] = request
        try:
            await self._host.prepare(request, job.adapter)
        finally:
            del self._preparing[job.transfer_id]
        try:
            await self._queue(job, request)
        except BaseException:
            self._host.release(request)
            raise

    async def _queue(self, job: PrefillJob, request: Request) -> None:
        """Fetch what a peer has of the prompt, then give the request to the engine."""
        # The engine needs these names anyway; the OFFER's tail hash needs them now.
        self._host.parts.hasher.extend(request.hash_root, request.block_hashes, request.token_ids)
        task = PrefillTask(job=job, request=request)
        if job.holder is not None and self.fabric is not None:
            begun_s = time.monotonic()
            task.fetched_tokens = await self.fabric.fetcher.fetch(request, job.holder, job.trace)
            task.fetch_s = time.monotonic() - begun_s

        def add(scheduler: Scheduler) -> None:
            scheduler.add(request)
            scheduler.pin_blocks(request.request_id)

        # Before the engine has it: the output of its first step may come before this coroutine continues.
        self._tasks[job.transfer_id] = task
        try:
            await self._host.call(add)
        except BaseException:
            del self._tasks[job.transfer_id]
            raise

    def abandon(self, transfer_id: TransferId) -> None:
        """End a `submit` that waits for its adapter: it raises Cancelled."""
        if (request := self._preparing.get(transfer_id)) is not None:
            self._host.release(request)

    def abort(self, transfer_id: TransferId) -> None:
        """Stop computing; the blocks stay pinned until the hub releases them."""
        self._host.post(lambda scheduler: scheduler.abort(RequestId(transfer_id)))

    def release(self, transfer_id: TransferId) -> None:
        """Unpin the blocks, which nothing reads any more."""
        task = self._tasks.pop(transfer_id, None)
        request_id = RequestId(transfer_id)

        def release_blocks(scheduler: Scheduler) -> None:
            if not scheduler.release_held(request_id):
                scheduler.abort(request_id)
            scheduler.unpin_blocks(request_id)

        self._host.post(release_blocks)
        if task is not None:
            self._host.release(task.request)

    # Engine output

    def on_output(self, output: StepOutput) -> None:
        self._scoring.on_output(output)
        self._pins.lost(output.lost_pins)
        if self.fabric is None:
            return
        hub = self.fabric.sender_hub
        now_s = time.monotonic()
        for admission in output.admissions:
            task = self._tasks.get(TransferId(admission.request_id))
            if task is not None:
                task.queued_s, task.admitted_s = max(0.0, admission.queued_s - task.fetch_s), now_s
                task.cached = admission.cached(task.fetched_tokens)
                hub.scheduled(task.job.transfer_id, admission.queued_s, task.tail_hash())
        # Tokens first: they need no block.
        for event in output.events:
            task = self._tasks.get(TransferId(event.request_id))
            if task is not None:
                self._on_event(hub, task, event)
        for progress in output.progress:
            task = self._tasks.get(TransferId(progress.request_id))
            if task is not None:
                self._on_progress(hub, task, progress, now_s)

    def on_layers(self, done: LayersDone) -> None:
        """Send the layers that are computed within a step."""
        if self.fabric is None:
            return
        for prompt in done.prompts:
            task = self._tasks.get(TransferId(prompt.request_id))
            if task is not None:
                self.fabric.sender_hub.progress(
                    task.job.transfer_id,
                    prompt.num_computed_tokens,
                    prompt.block_ids,
                    windows=prompt.window_ids,
                    coming_tokens=prompt.num_coming_tokens,
                    num_layers=done.num_layers,
                )

    def _on_event(self, hub: SenderHub, task: PrefillTask, event: TokenEvent) -> None:
        if event.token is None:
            if event.finish_reason is FinishReason.DEADLINE:
                hub.failed(task.job.transfer_id, DeadlineExceeded("the prompt's time ran out in the queue"))
            elif event.finish_reason is FinishReason.ERROR:
                hub.failed(task.job.transfer_id, unusable(task.request.guide))
        elif not task.job.resume:
            hub.first_token(task.job.transfer_id, event.token, event.num_cached_tokens, task.cached)

    def _on_progress(self, hub: SenderHub, task: PrefillTask, progress: PrefillProgress, now_s: float) -> None:
        transfer_id = task.job.transfer_id
        task.blocks.extend(progress.block_ids)
        if not task.windows:
            task.windows = [[] for _ in progress.window_ids]
        for windows, more in zip(task.windows, progress.window_ids, strict=True):
            windows.extend(more)
        if not progress.is_complete:
            hub.progress(transfer_id, progress.num_computed_tokens, task.blocks, windows=task.windows)
            return
        self._host.release(task.request)  # no step needs its adapter any more: what remains is to send the blocks
        hub.finished(
            transfer_id,
            task.blocks,
            windows=task.windows,
            cached_tokens=task.cached.total,
            times=task.times(now_s, block_bytes=self._host.parts.layout.worker_block_bytes),
            tail_hash=task.tail_hash(),
        )

    async def finish(self) -> None:
        """Accept no new prompts; complete the current ones."""
        await self._scoring.finish()
        if self.fabric is not None:
            await self.fabric.finish()
