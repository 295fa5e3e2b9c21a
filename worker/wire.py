"""Converts engine values to protobuf, for the sessions of both kinds of worker with routers."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from engine.assembly import EngineParts
from engine.types.kv_events import Cleared, Evicted, KVEvent, Stored
from engine.types.request import SampledToken
from engine.types.step_output import Load
from tandem.protocol.pin_wire import totals_to_pb
from tandem.protocol.session_versions import SPOKEN
from tandem.protocol.wire import layout_to_pb, logprobs_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.roles import WorkerRole
from tandem.values.worker_identity import WorkerIdentity
from worker.adapters import WorkerAdapters
from worker.work_meter import WorkMeter

_ROLES = {WorkerRole.PREFILL: pb.WORKER_ROLE_PREFILL, WorkerRole.DECODE: pb.WORKER_ROLE_DECODE}


def stored_to_pb(stored: Iterable[Stored]) -> list[pb.KVEvent]:
    """Convert a prefix index's whole content."""
    return [pb.KVEvent(block_hash=event.name, stored=True) for event in stored]


def events_to_pb(events: Sequence[KVEvent]) -> list[pb.KVEvent] | None:
    """Convert changes of a prefix index; None when one of them cleared it, so that a snapshot has to be sent."""
    changes: list[pb.KVEvent] = []
    for event in events:
        match event:
            case Stored():
                changes.append(pb.KVEvent(block_hash=event.name, stored=True))
            case Evicted():
                changes.append(pb.KVEvent(block_hash=event.name, stored=False))
            case Cleared():
                return None
    return changes


def load_to_pb(
    load: Load,
    *,
    prefill_tokens_per_s: float,
    decode_step_s: float,
    kv_bytes_per_s: float,
    step_age_s: float = 0.0,
    work: pb.WorkReport | None = None,
    adapters: WorkerAdapters[Any] | None = None,
) -> pb.LoadSnapshot:
    """The load report. Requests that wait for their adapter are not the engine's yet, but wait all the same."""
    num_waiting_for_adapters = 0 if adapters is None else adapters.num_waiting
    return pb.LoadSnapshot(
        num_running=load.num_running,
        num_waiting=load.num_waiting + load.num_reservations + num_waiting_for_adapters,
        num_reserved=load.num_reservations,
        backlog_tokens=load.num_backlog_tokens,
        num_free_blocks=max(0, load.num_blocks - load.num_used_blocks - load.num_promised_blocks),
        num_total_blocks=load.num_blocks,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_step_s=decode_step_s,
        kv_bytes_per_s=kv_bytes_per_s,
        step_age_s=step_age_s,
        num_quarantined_blocks=load.num_quarantined_blocks,
        cache_tiers=[pb.CacheTier(**asdict(counts)) for counts in load.tiers],
        pins=totals_to_pb(load.pins),
        work=work,
        resident_adapters=() if adapters is None else adapters.residents,
        adapters=None if adapters is None else _adapters_to_pb(adapters),
    )


def _adapters_to_pb(adapters: WorkerAdapters[Any]) -> pb.AdapterReport:
    return pb.AdapterReport(
        **asdict(adapters.totals),
        num_waiting=adapters.num_waiting,
        held_bytes=adapters.held_bytes,
        capacity_bytes=adapters.capacity_bytes,
    )


def work_to_pb(done: WorkMeter, parts: EngineParts, *, resident_bytes: int) -> pb.WorkReport:
    """Report the engine's work since start, and its memory."""
    size = parts.layout.tp_size
    return pb.WorkReport(
        prefill=pb.StepTotals(**asdict(done.prefill)),
        decode=pb.StepTotals(**asdict(done.decode)),
        preemptions=done.preemptions,
        resident_bytes=resident_bytes,
        weights_bytes=parts.budget.weights_bytes * size,
        kv_bytes=parts.budget.kv_bytes * size,
        flops_per_token=parts.model.flops_per_token,
        step_sizes=done.sizes,
        drafts=[pb.DraftTotals(source=source, **asdict(totals)) for source, totals in done.drafts.items()],
    )


def token_delta(request_id: str, attempt: int, first_index: int, tokens: Sequence[SampledToken]) -> pb.TokenDelta:
    """Tokens of one attempt; without tokens only their position."""
    return pb.TokenDelta(
        request_id=request_id,
        attempt=attempt,
        first_index=first_index,
        token_ids=[token.token_id for token in tokens],
        logprobs=[found for token in tokens if (found := logprobs_to_pb(token)) is not None],
    )


def hello_to_pb(parts: EngineParts, identity: WorkerIdentity, transports: Sequence[str]) -> pb.WorkerHello:
    """The hello of this worker: its identity and capabilities."""
    return pb.WorkerHello(
        protocol_version=SPOKEN.oldest,
        newest_version=SPOKEN.newest,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        role=_ROLES[identity.role],
        model_name=identity.model_name,
        max_model_len=parts.config.max_model_len,
        num_blocks=parts.config.num_blocks,
        num_blocks_below=0 if parts.scheduler.tiers is None else parts.scheduler.tiers.capacity_blocks,
        layout=layout_to_pb(parts.layout),
        handoff_address=identity.handoff_address,
        transports=transports,
        vocab_size=parts.model.vocab_size,
        eos_token_ids=sorted(parts.config.eos_token_ids),
        rack=identity.rack,
    )
