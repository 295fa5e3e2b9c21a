"""Connects an engine on its thread with the event loop: calls go in, one output per step comes out, in order.

Used by both kinds of worker. Everything from the engine thread passes through one queue of the loop, so a prefix
snapshot keeps its place among the events around it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from engine.adapters.store import PackedAdapter
from engine.assembly import EngineParts
from engine.distributed.ranks.mirror import Mirror
from engine.engine import Engine
from engine.sampling.constraints import AllOf, AllowedTokens, BannedSequences, catch_up
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_rates import RateMeter
from engine.stall import EngineStalled, StallWatch
from engine.tier_assembly import keep_cached
from engine.types.kv_events import KVEventBatch
from engine.types.request import Request
from engine.types.runner import Runner
from engine.types.step_output import LayersDone, Load, StepOutput
from engine.types.token_guide import TokenGuide
from tandem.adapters.files import Adapter
from tandem.errors import Cancelled, DeadlineExceeded, InvalidRequest, ServingError
from tandem.process.host_memory import resident_bytes
from tandem.protocol.session_versions import MOST_LOAD_PERIOD_S
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockId, RequestId
from tandem.values.prefix_pin import PinOrder, PinOutcome, PinResult
from worker.adapters import WorkerAdapters
from worker.session_port import EventSink
from worker.wire import events_to_pb, load_to_pb, stored_to_pb, work_to_pb
from worker.work_meter import WorkMeter

_log = logging.getLogger(__name__)

T = TypeVar("T")

_LOAD_WAIT_S = 0.2
_KEEP_S = 5.0
"""Time limit of writing cached blocks to disk at the end."""


class EngineHost:
    """Starts and stops the engine, and passes calls and results between its thread and the event loop."""

    def __init__(self, parts: EngineParts, *, on_fatal: Callable[[BaseException], None]) -> None:
        """`on_fatal` is called on the event loop when the engine has failed: the process must end."""
        self.parts = parts
        self.rates = RateMeter()
        self._work = WorkMeter()
        self.kv_bytes_per_s = 0.0
        self._on_output: Callable[[StepOutput], None] = _ignore
        self._on_layers: Callable[[LayersDone], None] | None = None
        self._on_fatal = on_fatal
        self._has_failed = False
        self._read = asyncio.Event()
        self._ports: Callable[[], Iterable[EventSink]] = tuple
        self._load: Load = parts.scheduler.load()
        self._loop = asyncio.get_running_loop()
        # One thread for all grammars, so that compiling them leaves the other cores to the engine.
        self._grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._adapters = self._worker_adapters(parts)
        self._holds: dict[RequestId, asyncio.Future[int]] = {}
        """Slots of the adapters that requests hold, or wait for."""
        self._stall_watch = StallWatch(stall_s=parts.stall_s, period_s=MOST_LOAD_PERIOD_S, now_s=time.monotonic())
        self._engine = Engine(
            scheduler=parts.scheduler,
            runner=parts.runner,
            on_step=lambda output: self._call_on_loop(self._on_step, output),
            on_fatal=self._fail,
            clock=time.monotonic,
            pipelined=parts.is_pipelined,
            on_layers=self._forward_layers,
        )

    def start(
        self,
        *,
        on_output: Callable[[StepOutput], None],
        ports: Callable[[], Iterable[EventSink]],
        on_layers: Callable[[LayersDone], None] | None = None,
    ) -> None:
        """Start the engine's thread. Callbacks run on the event loop; `ports` get the events of the prefix cache.

        `on_layers` is called within steps that compute prompts for decode workers.
        """
        self._on_output = on_output
        self._on_layers = on_layers
        self._ports = ports
        self.parts.ranks.watch(lambda lost: self._call_on_loop(self._on_fatal, lost))
        if self.parts.disk is not None:
            self.parts.disk.listen(self._on_read)
        self._engine.start()

    async def stop(self) -> None:
        """Stop after the current step, then end the disk's threads and the other ranks."""
        self._grammars.shutdown(wait=False, cancel_futures=True)
        if self._adapters is not None:
            await self._adapters.close()
        await asyncio.to_thread(self._engine.stop)
        tiers, disk = self.parts.scheduler.tiers, self.parts.disk
        if disk is not None and tiers is not None:
            if not self._has_failed:
                await asyncio.to_thread(keep_cached, tiers, disk, timeout_s=_KEEP_S)
            await asyncio.to_thread(disk.close)
        await asyncio.to_thread(self.parts.ranks.close)

    def call(self, fn: Callable[[Scheduler], T]) -> Awaitable[T]:
        """Run `fn` between two steps. Raises what `fn` raises.

        It is queued now, not when it is awaited. Shielded: cancelling the caller does not cancel the call.
        """
        inner = asyncio.wrap_future(self._engine.call(fn))
        answer = asyncio.shield(inner)
        # Both: a shield that is cancelled no longer looks at what it shields.
        for future in (inner, answer):
            future.add_done_callback(_retrieve)
        return answer

    async def gather_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Copy all ranks' parts of these blocks into this worker's memory, for a peer to read; nothing may be writing
        them.

        Many blocks are copied in portions, each between two steps.
        """
        if (mirror := self.parts.ranks.mirror) is None:
            return
        for begin in range(0, len(blocks), mirror.most_blocks):
            portion = tuple(blocks[begin : begin + mirror.most_blocks])
            await self.call(partial(_fetch_stale, mirror, portion))

    def post(self, fn: Callable[[Scheduler], object]) -> None:
        """Run `fn` between two steps, in order with other calls; a ServingError that it raises is dropped."""
        self._engine.call(fn).add_done_callback(_drop_refusal)

    async def replace_runner(self, replace: Callable[[Runner], Runner]) -> None:
        """Replace the runner of the next steps; `replace` runs on the engine's thread, between two steps."""
        await self.call(lambda _: self._engine.replace_runner(replace))

    def pin(self, order: PinOrder, on_outcome: Callable[[PinResult], None]) -> None:
        """Make or renew a pin between two steps; `on_outcome` is called with the result on the event loop.

        An order that is refused as invalid has an outcome too: its router waits for one.
        """

        def pin(scheduler: Scheduler) -> None:
            try:
                result = scheduler.pins.pin(order, time.monotonic())
            except ServingError as refusal:
                _log.warning("a pin was refused: %s", refusal.message)
                result = PinResult(key=order.key, outcome=PinOutcome.NO_ROOM)
            self._call_on_loop(on_outcome, result)

        self.post(pin)

    def next_read(self) -> asyncio.Event:
        """Event that is set when the disk has read another block from now on."""
        return self._read

    def _on_read(self) -> None:
        self._engine.wake()
        self._call_on_loop(self._note_read, None)

    def _note_read(self, _: None) -> None:
        self._read.set()
        self._read = asyncio.Event()

    def _worker_adapters(self, parts: EngineParts) -> WorkerAdapters[PackedAdapter] | None:
        if parts.adapters is None:
            return None
        return WorkerAdapters(
            parts.adapters,
            call=lambda change: self.call(lambda _: change()),
            max_waiting=parts.config.max_waiting_requests,
        )

    async def prepare(self, request: Request, adapter: Adapter | None = None) -> None:
        """Get everything that the request needs before the engine has it: its adapter, loaded if need be, its guide.

        Whatever comes of the request, `release` has to follow. Raises ServingError: then nothing is held. A request
        whose turn has not come when its time runs out raises DeadlineExceeded, one that is released meanwhile
        Cancelled.
        """
        try:
            if adapter is not None:
                await self._hold(request, adapter)
            await self.guide(request)
        except BaseException:
            self.release(request)
            raise

    def release(self, request: Request) -> None:
        """Give up what was prepared for a request: the engine does not have it, or its end was posted already.

        Repeated calls change nothing.
        """
        if (hold := self._holds.pop(request.request_id, None)) is None or self._adapters is None:
            return
        if not hold.cancel() and not hold.cancelled() and hold.exception() is None:
            self._adapters.release(hold.result())

    async def _hold(self, request: Request, adapter: Adapter) -> None:
        if self._adapters is None:
            raise InvalidRequest("this worker takes no adapters", param="model")
        # The loop's clock is the one of deadlines.
        hold = self._holds[request.request_id] = asyncio.ensure_future(self._adapters.hold(adapter))
        try:
            async with asyncio.timeout_at(request.deadline_s):
                slot = await asyncio.shield(hold)
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out while it waited for its adapter") from None
        except asyncio.CancelledError:
            if not hold.cancelled() or request.request_id in self._holds:
                raise
        if request.request_id not in self._holds:  # maybe released in the very turn in which the adapter came
            raise Cancelled("the request ended while it waited for its adapter")
        request.adapter_slot = slot

    async def guide(self, request: Request) -> None:
        """Set the guide that the request's parameters require. Raises InvalidRequest; a grammar may take a second.

        Off the engine's thread: compiling, a grammar's first masks, and following the output so far.
        """
        if request.guide is not None:
            return
        params, vocab_size = request.params, self.parts.model.vocab_size
        followed: list[TokenGuide] = []
        if params.allowed_token_ids:
            followed.append(AllowedTokens(params.allowed_token_ids, vocab_size))
        if params.bad_words:
            followed.append(BannedSequences(params.bad_words))
        if params.grammar is not None:
            followed.append(await self._grammar_guide(params.grammar))
        if not followed:
            return
        guide = followed[0] if len(followed) == 1 else AllOf(followed)
        output = request.token_ids[request.num_prompt_tokens :]
        if params.grammar is not None and output:
            await self._loop.run_in_executor(self._grammars, catch_up, guide, output, vocab_size)
        request.guide = guide

    async def _grammar_guide(self, grammar: str) -> TokenGuide:
        guides = self.parts.guides
        if guides is None:
            raise InvalidRequest("grammar: this worker does not support any", param="grammar")
        guide = guides.cached_guide(grammar)
        if guide is None:
            guide = await self._loop.run_in_executor(self._grammars, guides.guide, grammar)
        return guide

    async def load(self) -> pb.LoadSnapshot:
        """A current load report, or that of the last step during a long one. Also checks for a stalled engine."""
        self._check_for_stall()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_WAIT_S):
                self._load = await self.call(lambda scheduler: scheduler.load())
        return load_to_pb(
            self._load,
            adapters=self._adapters,
            prefill_tokens_per_s=self.rates.settled_prefill_tokens_per_s,
            decode_step_s=self.rates.settled_decode_step_s,
            kv_bytes_per_s=self.kv_bytes_per_s,
            step_age_s=self._stall_watch.age_s,
            work=work_to_pb(self._work, self.parts, resident_bytes=resident_bytes()),
        )

    def _check_for_stall(self) -> None:
        if self._has_failed:
            return
        try:
            self._stall_watch.check(self._engine.turn, self.rates, time.monotonic())
        except EngineStalled as stalled:
            _log.critical("the engine is stalled: %s", stalled)
            self._has_failed = True
            self._on_fatal(stalled)

    def send_snapshot(self, sink: EventSink) -> None:
        """Send the whole prefix cache, from which later events count."""

        def snapshot(scheduler: Scheduler) -> None:
            next_seq, stored = scheduler.blocks.snapshot()
            self._call_on_loop(lambda _: sink.send_snapshot(next_seq, stored_to_pb(stored)), None)

        self.post(snapshot)

    def _forward_layers(self, done: LayersDone) -> None:
        if self._on_layers is not None:
            self._call_on_loop(self._on_layers, done)

    def _fail(self, error: BaseException) -> None:
        self._has_failed = True  # from here on the content of blocks is unreliable
        self._call_on_loop(self._on_fatal, error)

    def _call_on_loop(self, fn: Callable[[T], None], value: T) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, value)
        except RuntimeError:  # the loop has closed: the process is ending
            _log.debug("dropped an engine event after the end")

    def _on_step(self, output: StepOutput) -> None:
        try:
            self._load = output.load
            if output.timings is not None:
                self.rates.observe(output.timings)
            self._work.observe(output)
            self._publish(output.kv_events)
            self._on_output(output)
        except Exception as error:  # noqa: BLE001 - a callback of the loop: nothing above it would report the error
            # Some requests have missed tokens of this step, which no later one can supply.
            self._on_fatal(error)

    def _publish(self, batch: KVEventBatch) -> None:
        if not batch.events:
            return
        changes = events_to_pb(batch.events)
        for sink in self._ports():
            if changes is None or not sink.send_events(batch.first_seq, changes):
                self.send_snapshot(sink)


def _fetch_stale(mirror: Mirror, blocks: Sequence[BlockId], _: Scheduler) -> None:
    mirror.fetch_stale(blocks)


def _ignore(_output: StepOutput) -> None:
    """Ignore an output: the default of `on_output` before `start`."""


def _retrieve(answer: "asyncio.Future[T]") -> None:
    """Keep asyncio from reporting what nobody awaits any more: a refusal, or an error that has ended the engine, which
    `on_fatal` reports."""
    if not answer.cancelled():
        answer.exception()


def _drop_refusal(future: "Future[object]") -> None:
    error = future.exception()
    if isinstance(error, ServingError):
        _log.debug("engine call refused: %s", error.message)
