"""Collects the events of a step for its output."""

from engine.types.kv_events import KVEventLog
from engine.types.request import FinishReason, Request, SampledToken, TokenEvent
from engine.types.step_output import AdmittedSequence, Load, PrefillProgress, StepOutput
from tandem.values.ids import RequestId
from tandem.values.prefix_pin import PinKey


class StepEventCollector:
    """Collects everything that happened since the last output."""

    __slots__ = (
        "_admissions",
        "_events",
        "_kv_events",
        "_lost_pins",
        "_num_reported_blocks",
        "_preemptions",
        "_progress",
    )

    def __init__(self, kv_events: KVEventLog) -> None:
        self._kv_events = kv_events
        self._events: list[TokenEvent] = []
        self._admissions: list[AdmittedSequence] = []
        self._progress: list[PrefillProgress] = []
        self._preemptions: list[RequestId] = []
        self._lost_pins: list[PinKey] = []
        self._num_reported_blocks: dict[RequestId, int] = {}

    @property
    def has_admissions(self) -> bool:
        """Whether a request has left the queue for the first time."""
        return bool(self._admissions)

    def __bool__(self) -> bool:
        pending = self._events or self._admissions or self._progress or self._preemptions or self._lost_pins
        return bool(pending or len(self._kv_events))

    def token(self, request: Request, index: int, token: SampledToken, reason: FinishReason | None) -> None:
        """Record the output token at `index`, which may also end the request."""
        self._events.append(TokenEvent(request.request_id, index, token, reason, request.num_cached_tokens))

    def end(self, request: Request, reason: FinishReason) -> None:
        """Record that the request ended without another token."""
        index = request.num_output_tokens
        self._events.append(TokenEvent(request.request_id, index, None, reason, request.num_cached_tokens))

    def admission(self, request: Request, now: float) -> None:
        """Record that the request left the queue for the first time."""
        self._admissions.append(
            AdmittedSequence(
                request_id=request.request_id,
                queued_s=now - request.arrival_s,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_host_tokens=request.num_host_tokens,
                num_disk_tokens=request.num_disk_tokens,
                prefill_only=request.prefill_only,
            )
        )

    def preemption(self, request: Request) -> None:
        """Record that the request lost its blocks and queues again."""
        self._preemptions.append(request.request_id)

    def pin_lost(self, key: PinKey) -> None:
        """Record that a pinned prefix was given up."""
        self._lost_pins.append(key)

    def progress(self, request: Request, block_size: int) -> None:
        """Record a chunk of a `prefill_only` request and the source blocks that it completed."""
        is_complete = request.num_uncomputed_tokens == 0
        first = self._num_reported_blocks.get(request.request_id, 0)
        end = len(request.block_table) if is_complete else request.num_computed_tokens // block_size
        self._num_reported_blocks[request.request_id] = end
        self._progress.append(
            PrefillProgress(
                request_id=request.request_id,
                num_computed_tokens=request.num_computed_tokens,
                first_block_index=first,
                block_ids=tuple(request.block_table[i] for i in range(first, end)),
                window_ids=() if request.windows is None else request.windows.blocks(first, end),
                is_complete=is_complete,
            )
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop the progress of a finished request."""
        self._num_reported_blocks.pop(request_id, None)

    def drain(self, load: Load) -> StepOutput:
        """Return everything collected since the last call."""
        output = StepOutput(
            events=tuple(self._events),
            admissions=tuple(self._admissions),
            progress=tuple(self._progress),
            preemptions=tuple(self._preemptions),
            kv_events=self._kv_events.drain(),
            load=load,
            lost_pins=tuple(self._lost_pins),
        )
        for collected in (self._events, self._admissions, self._progress, self._preemptions, self._lost_pins):
            collected.clear()
        return output
