"""Prompt scoring at a worker of either kind: log probabilities or pooled states of prompts that are not continued.

Life of one: order → engine queue → chunks → the scores, in messages of bounded size → gone. After any error the worker
sends Refused and the router tries another worker: partial results are not worth keeping.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

from engine.model.pooling_head import PoolingHead
from engine.types.prompt_logprobs import PromptPooling, PromptScoringState
from engine.types.request import FinishReason, Request, SampledToken
from engine.types.step_output import StepOutput
from engine.types.token_guide import unusable
from tandem.adapters.files import Adapter
from tandem.errors import DeadlineExceeded, InternalError, InvalidRequest, ServingError, Unavailable
from tandem.protocol.wire import adapter_from_pb, failure_to_pb, pooling_from_pb, times_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BYTES
from tandem.values.ids import BlockHash, RequestId
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, PhaseTimes
from tandem.values.sampling import MAX_CONTINUATIONS, MAX_TOP_LOGPROBS, SamplingParams
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

_log = logging.getLogger(__name__)
_VALUES_PER_MESSAGE = 16_384
_MAX_ID_CHARS = 256
_MAX_LABELS = 64
_ENDS = {
    FinishReason.DEADLINE: DeadlineExceeded("the prompt's time ran out in the queue"),
    FinishReason.ABORT: InternalError("the engine ended the request"),
    FinishReason.ERROR: unusable(None),
}


_Order = tuple[SessionPort, str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class _Task:
    port: SessionPort
    request_id: str
    attempt: int
    request: Request
    queued_s: float = 0.0
    cached: CachedTokens = NO_CACHED_TOKENS
    head: PoolingHead | None = None
    """What pooled states have to pass through."""
    next_token: SampledToken | None = None
    """The most likely token with all requested alternatives, for an order that wants continuations."""

    @property
    def order(self) -> _Order:
        """Key of the router's order."""
        return self.port, self.request_id, self.attempt

    @property
    def is_pooled(self) -> bool:
        """Whether pooled states are wanted."""
        scoring = self.request.scoring
        return scoring is not None and scoring.num_top is None

    def vector(self) -> list[float]:
        """Return the pooled states, which are complete when the engine has ended the request."""
        scoring = self.request.scoring
        return [] if scoring is None or scoring.num_top is not None else scoring.vector()


class PromptScoringOrders:
    """Prompt scoring orders of one worker. On the event loop's thread."""

    def __init__(self, host: EngineHost, *, in_prefill_pool: bool) -> None:
        self._host = host
        self._in_prefill_pool = in_prefill_pool
        self._serial = count(1)
        self._tasks: dict[RequestId, _Task] = {}
        self._by_order: dict[_Order, _Task] = {}
        """The same tasks by order: a call for many embeddings has many orders here at once."""
        # A thread of its own: steps' vectors stay in order, and never wait for other work.
        self._head_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pooling-head")
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def handle(self, port: SessionPort, message: pb.RouterMessage) -> bool:
        """Handle an order if it is about prompt scoring; return whether it is."""
        if message.HasField("score_prompt"):
            self._begin(port, message.score_prompt)
            return True
        if message.HasField("cancel"):
            cancel = message.cancel
            if (task := self._by_order.get((port, cancel.request_id, cancel.attempt))) is not None:
                self._abandon(task)
                return True
        return False

    def closed(self, port: SessionPort) -> None:
        """Abandon the orders of a router that disconnected; it retries them elsewhere."""
        for task in [task for task in self._tasks.values() if task.port is port]:
            self._abandon(task)

    async def finish(self) -> None:
        """Accept no more orders and wait for the current ones."""
        self._draining = True
        await self._idle.wait()

    def on_output(self, output: StepOutput) -> None:
        if not self._tasks:
            return
        for admission in output.admissions:
            if (task := self._tasks.get(admission.request_id)) is not None:
                task.queued_s = admission.queued_s
                task.cached = replace(admission, prefill_only=self._in_prefill_pool).cached(0)
        behind: list[_Task] = []
        for event in output.events:
            task = self._tasks.get(event.request_id)
            if task is None or event.finish_reason is None:
                continue
            task.next_token = event.token
            if (error := _ENDS.get(event.finish_reason)) is not None:
                self._end(task, error)
            elif task.head is not None and task.is_pooled:
                behind.append(task)
            else:
                self._answer(task, task.vector())
        if behind and (head := behind[0].head) is not None:
            self._pass_through(head, behind)

    def _pass_through(self, head: PoolingHead, tasks: Sequence[_Task]) -> None:
        """Compute the layers behind the pooling for a step's vectors, off the event loop, then answer."""
        loop = asyncio.get_running_loop()
        passing = loop.run_in_executor(self._head_thread, lambda: head([task.vector() for task in tasks]))
        passing.add_done_callback(lambda future: self._passed(tasks, future))

    def _passed(self, tasks: Sequence[_Task], future: "asyncio.Future[list[array[float]]]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            _log.error("the layers behind the pooling failed", exc_info=error)
        for index, task in enumerate(tasks):
            if self._tasks.get(task.request.request_id) is not task:
                continue  # cancelled meanwhile
            if error is not None:
                self._end(task, InternalError("the layers behind the pooling failed"))
            else:
                self._answer(task, future.result()[index])

    def _answer(self, task: _Task, vector: Sequence[float]) -> None:
        self._remove(task)
        for part in _parts(task, self._host.parts.layout.worker_block_bytes, vector):
            task.port.send(pb.WorkerMessage(prompt_scores=part))

    def _end(self, task: _Task, error: ServingError) -> None:
        self._remove(task)
        _refuse(task.port, task.request_id, task.attempt, error)

    def _begin(self, port: SessionPort, order: pb.ScorePrompt) -> None:
        try:
            if self._draining:
                raise Unavailable("this worker is draining", retry_after_s=1.0)
            if (port, order.request_id, order.attempt) in self._by_order:
                raise InvalidRequest(f"attempt {order.attempt} of this request already exists", param="request_id")
            request = self._request(order)
        except ServingError as error:
            _refuse(port, order.request_id, order.attempt, error)
            return
        task = _Task(
            port=port,
            request_id=order.request_id,
            attempt=order.attempt,
            request=request,
            head=self._host.parts.pooling_head if order.through_head else None,
        )
        self._tasks[request.request_id] = self._by_order[task.order] = task
        self._idle.clear()
        if order.HasField("adapter"):
            added = asyncio.ensure_future(self._add_with(task, adapter_from_pb(order.adapter)))
        else:
            added = asyncio.ensure_future(self._host.call(lambda scheduler: scheduler.add(request)))
        added.add_done_callback(lambda future: self._added(task, future))

    async def _add_with(self, task: _Task, adapter: Adapter) -> None:
        """Queue a request once its adapter is here, unless it was abandoned meanwhile."""
        await self._host.prepare(task.request, adapter)
        if task.request.request_id in self._tasks:
            await self._host.call(lambda scheduler: scheduler.add(task.request))
        else:
            self._host.release(task.request)

    def _scoring(self, order: pb.ScorePrompt) -> PromptScoringState | None:
        """None: continuations are wanted, which are sampled as ever."""
        if order.HasField("num_next"):
            if not 1 <= order.num_next <= min(MAX_CONTINUATIONS, self._host.parts.model.vocab_size):
                raise InvalidRequest(f"num_next must be in [1, {MAX_CONTINUATIONS}]", param="num_next")
            return None
        num_top, parts = order.num_top if order.HasField("num_top") else None, self._host.parts
        if num_top is not None and num_top > min(MAX_TOP_LOGPROBS, parts.model.vocab_size):
            raise InvalidRequest(f"num_top must be at most {MAX_TOP_LOGPROBS}", param="num_top")
        labels = tuple(order.label_token_ids)
        if len(labels) > _MAX_LABELS or any(label >= parts.model.vocab_size for label in labels):
            bound = f"at most {_MAX_LABELS} token ids below the vocabulary's {parts.model.vocab_size}"
            raise InvalidRequest(f"label_token_ids must be {bound}", param="label_token_ids")
        if order.through_head and parts.pooling_head is None:
            raise InvalidRequest("this model has no layers behind its pooling", param="through_head")
        if order.num_skipped >= max(1, len(order.prompt_token_ids)):
            raise InvalidRequest("num_skipped must leave a token to be pooled", param="num_skipped")
        return PromptScoringState(
            num_prompt_tokens=len(order.prompt_token_ids),
            num_top=0 if labels else num_top,
            pooling=PromptPooling(modes=pooling_from_pb(order.pooling), num_skipped=order.num_skipped),
            label_token_ids=labels,
        )

    def _request(self, order: pb.ScorePrompt) -> Request:
        num_next = order.num_next if order.HasField("num_next") else None
        vocab_size = self._host.parts.model.vocab_size
        if len(order.hash_root) != HASH_BYTES or not 0 < len(order.request_id) <= _MAX_ID_CHARS:
            raise InvalidRequest(f"hash_root must have {HASH_BYTES} bytes, request_id 1 to {_MAX_ID_CHARS} characters")
        if order.prompt_token_ids and max(order.prompt_token_ids) >= vocab_size:
            raise InvalidRequest(f"prompt_token_ids must be below the vocabulary's {vocab_size}", param="prompt")
        now_s = time.monotonic()
        return Request(
            request_id=RequestId(f"score {next(self._serial)}:{order.request_id}"),
            token_ids=array("i", order.prompt_token_ids),
            num_prompt_tokens=len(order.prompt_token_ids),
            params=SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=num_next),
            hash_root=BlockHash(order.hash_root),
            arrival_s=now_s,
            priority=order.priority,
            deadline_s=now_s + order.timeout_s if order.HasField("timeout_s") else None,
            scoring=self._scoring(order),
        )

    def _added(self, task: _Task, future: "asyncio.Future[None]") -> None:
        """Refuse the order if the engine did not accept it."""
        if future.cancelled() or (error := future.exception()) is None:
            return
        if task.request.request_id in self._tasks:
            self._end(task, error if isinstance(error, ServingError) else InternalError("the engine has failed"))

    def _abandon(self, task: _Task) -> None:
        self._remove(task)
        self._host.post(lambda scheduler: scheduler.abort(task.request.request_id))

    def _remove(self, task: _Task) -> None:
        del self._tasks[task.request.request_id], self._by_order[task.order]
        self._host.release(task.request)
        if not self._tasks:
            self._idle.set()


def _refuse(port: SessionPort, request_id: str, attempt: int, error: ServingError) -> None:
    refused = pb.Refused(request_id=request_id, attempt=attempt, failure=failure_to_pb(error))
    port.send(pb.WorkerMessage(refused=refused))


def _parts(task: _Task, block_bytes: int, vector: Sequence[float]) -> Iterator[pb.PromptScores]:
    """All scores, and the vector in the last part, which says that it is the last."""
    scoring = task.request.scoring
    if scoring is None:
        top = () if task.next_token is None else task.next_token.top_logprobs
        part = pb.PromptScores(
            request_id=task.request_id,
            attempt=task.attempt,
            top_ids=[one.token_id for one in top],
            top_logprobs=[one.logprob for one in top],
        )
        yield _with_times(part, task, block_bytes)
        return
    width, rows = scoring.num_top or 0, len(scoring.logprobs)
    step = max(1, _VALUES_PER_MESSAGE // (2 + 2 * width))
    last = max(0, rows - 1) // step * step
    for begin in range(0, last + 1, step):
        end = min(rows, begin + step)
        part = pb.PromptScores(
            request_id=task.request_id,
            attempt=task.attempt,
            logprobs=scoring.logprobs[begin:end],
            ranks=scoring.ranks[begin:end],
            top_ids=scoring.top_ids[begin * width : end * width],
            top_logprobs=scoring.top_logprobs[begin * width : end * width],
            mean=vector if begin == last else (),
        )
        yield _with_times(part, task, block_bytes) if begin == last else part


def _with_times(part: pb.PromptScores, task: _Task, block_bytes: int) -> pb.PromptScores:
    """Mark the last part of an answer, by adding the request's times."""
    request, now_s = task.request, time.monotonic()
    times = PhaseTimes(
        prefill_queue_s=task.queued_s,
        prefill_s=max(0.0, now_s - request.arrival_s - task.queued_s),
        kv_byte_s=request.held.until(now_s) * block_bytes,
        cached=task.cached,
    )
    part.times.CopyFrom(times_to_pb(times))
    return part
