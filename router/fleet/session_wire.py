"""Converts between protobuf and values for the session with workers."""

from collections.abc import Callable

from router.types.session_events import (
    AttemptFinished,
    AttemptRefused,
    AttemptStarted,
    CacheOffer,
    CommittedHandoff,
    MigrationPlan,
    PrefillRoute,
    PromptScoresPart,
    PromptScoringOrder,
    SubmitOrder,
    TokensArrived,
    TransferFailed,
)
from router.types.worker_view import (
    AdapterReport,
    CacheTierLoad,
    DraftSourceTotals,
    EngineStepTotals,
    EngineWorkReport,
    MigratedBlocks,
    PrefixChange,
    RedisPublishingReport,
    TransferEnds,
    TransferReport,
    TransferSide,
    WorkerInfo,
    WorkerKey,
    WorkerLoad,
)
from tandem.errors import InvalidRequest
from tandem.protocol.chain_wire import chains_from_pb, chains_to_pb
from tandem.protocol.pin_wire import order_to_pb, totals_from_pb
from tandem.protocol.session_versions import DIRECT_TICKET_BYTES, PROMPT_BYTES_SINCE, SPOKEN
from tandem.protocol.version_negotiation import NoCommonVersion, VersionRange
from tandem.protocol.wire import (
    adapter_to_pb,
    failure_from_pb,
    fill_sampling,
    finish_reason_from_pb,
    layout_from_pb,
    pooling_to_pb,
    times_from_pb,
    token_from_pb,
    token_ids_to_bytes,
)
from tandem.v1 import pins_pb2 as pins_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.kv_layout import DTYPE_BITS
from tandem.values.outputs import FinishReason, PredictionUse, bare_token
from tandem.values.prefix_holder import holder_to_pb
from tandem.values.prefix_pin import NO_PINS, PinKey, PinOrder
from tandem.values.roles import WorkerRole
from tandem.values.step_sizes import DRAFT_PLACES, DRAFT_SOURCES, STEP_SIZES

_ROLES: dict[int, WorkerRole] = {
    pb.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    pb.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}
_TIERS = frozenset({"host", "disk"})
_MAX_TIERS = 4
_NO_ADAPTERS: frozenset[str] = frozenset()
_MAX_OFFER_S = 600.0
_MAX_POOL_TOKENS = 1 << 48
_MAX_PORT = 65535
_MOST_BYTES_TOGETHER = 1 << 20
"""Bytes of orders in one message, not counting the last one: far below gRPC's limit, which fits the longest prompt."""


class ProtocolError(Exception):
    """The peer sent something that the session's protocol does not allow; the text names it."""


def hello_to_pb(
    incarnation: Incarnation, *, reads_redis: bool = False, direct: bool = False, load_period_s: float = 0.0
) -> pb.RouterMessage:
    """Make the router's first message.

    `direct`: the session can go on at the worker's direct port. `load_period_s`: the period of
    load reports that suffices; 0: the default.
    """
    hello = pb.RouterHello(
        protocol_version=SPOKEN.oldest,
        newest_version=SPOKEN.newest,
        incarnation=incarnation,
        reads_redis=reads_redis,
        direct=direct,
        load_period_s=load_period_s,
    )
    return pb.RouterMessage(hello=hello)


def end_earlier_sessions_to_pb() -> pb.RouterMessage:
    """Make the message that ends earlier sessions of this router."""
    return pb.RouterMessage(end_earlier_sessions=pb.EndEarlierSessions())


def take_over_to_pb(request_id: RequestId, attempt: int, num_shown: int, handle: int) -> pb.RouterMessage:
    """Make the message that hands another router's stream to this one."""
    order = pb.TakeOver(request_id=request_id, attempt=attempt, num_shown=num_shown, handle=handle)
    return pb.RouterMessage(take_over=order)


def hello_from_pb(message: pb.WorkerMessage) -> WorkerInfo:
    """Convert a worker's first message. Raises ProtocolError when it is another message or has impossible values."""
    if not message.HasField("hello"):
        raise ProtocolError(f"expected hello, got {message.WhichOneof('kind')}")
    hello = message.hello
    try:
        version = SPOKEN.negotiate(VersionRange.from_hello(hello.protocol_version, hello.newest_version))
    except NoCommonVersion as error:
        raise ProtocolError(str(error)) from None
    role = _ROLES.get(hello.role)
    layout = layout_from_pb(hello.layout)
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.tp_size)
    if role is None or not hello.worker_id or not hello.num_blocks or not hello.max_model_len:
        raise ProtocolError("hello lacks worker_id, role, num_blocks or max_model_len")
    port, num_bytes = hello.direct_port, len(hello.direct_ticket)
    if port and (port > _MAX_PORT or num_bytes != DIRECT_TICKET_BYTES):
        raise ProtocolError(f"hello has direct_port {port} with a ticket of {num_bytes} bytes")
    if layout.dtype not in DTYPE_BITS or min(sizes) < 1:
        raise ProtocolError(f"hello has an impossible KV layout: dtype {layout.dtype!r}, sizes {sizes}")
    if (tokens := (hello.num_blocks + hello.num_blocks_below) * layout.block_size) > _MAX_POOL_TOKENS:
        raise ProtocolError(f"hello has a pool of {tokens} tokens: at most {_MAX_POOL_TOKENS}")
    return WorkerInfo(
        key=WorkerKey(WorkerId(hello.worker_id), Incarnation(hello.incarnation)),
        role=role,
        model_name=hello.model_name,
        max_model_len=hello.max_model_len,
        num_blocks=hello.num_blocks,
        layout=layout,
        handoff_address=hello.handoff_address,
        transports=frozenset(hello.transports),
        vocab_size=hello.vocab_size,
        eos_token_ids=frozenset(hello.eos_token_ids),
        num_blocks_below=hello.num_blocks_below,
        protocol_version=version,
        rack=hello.rack,
        is_direct=bool(hello.direct_port),
    )


def submit_to_pb(order: SubmitOrder, handle: int, version: int = SPOKEN.newest) -> pb.RouterMessage:
    """Convert one attempt at one choice. `handle`: its name in `StepTokens`' columns; `version`: the session's."""
    # Field by field: a message that is made of another one copies it, the prompt included.
    message = pb.RouterMessage()
    submit = message.submit
    submit.request_id = order.request_id
    submit.attempt = order.attempt
    submit.choice_index = order.choice_index
    submit.hash_root = order.hash_root
    submit.priority = order.priority
    submit.tokens_per_message = order.tokens_per_message
    submit.handle = handle
    if version >= PROMPT_BYTES_SINCE:
        submit.prompt = token_ids_to_bytes(order.prompt_token_ids)
    else:
        submit.prompt_token_ids.extend(order.prompt_token_ids)
    fill_sampling(submit.sampling, order.sampling)
    if order.generated_token_ids:
        submit.generated_token_ids.extend(order.generated_token_ids)
    if order.timeout_s is not None:
        submit.timeout_s = order.timeout_s
    if order.prefill is not None:
        submit.prefill.CopyFrom(_route_to_pb(order.prefill))
    if (holder := holder_to_pb(order.holder)) is not None:
        submit.holder.CopyFrom(holder)
    if order.trace is not None:
        submit.trace = order.trace.to_text()
    if order.prediction is not None:
        submit.prediction = token_ids_to_bytes(order.prediction)
    if order.adapter is not None:
        submit.adapter.CopyFrom(adapter_to_pb(order.adapter))
    return message


def score_prompt_to_pb(order: PromptScoringOrder) -> pb.RouterMessage:
    """Convert one attempt at scoring one prompt."""
    score_prompt = pb.ScorePrompt(
        request_id=order.request_id,
        attempt=order.attempt,
        prompt_token_ids=order.prompt_token_ids,
        hash_root=order.hash_root,
        priority=order.priority,
        timeout_s=order.timeout_s,
        num_top=order.num_top,
        num_next=order.num_next,
        pooling=pooling_to_pb(order.pooling),
        num_skipped=order.num_skipped,
        through_head=order.through_head,
        label_token_ids=order.label_token_ids,
        adapter=None if order.adapter is None else adapter_to_pb(order.adapter),
    )
    return pb.RouterMessage(score_prompt=score_prompt)


def scores_part_from_pb(part: pb.PromptScores) -> PromptScoresPart:
    """Convert a part of a prompt's scores."""
    return PromptScoresPart(
        logprobs=part.logprobs,
        ranks=part.ranks,
        top_ids=part.top_ids,
        top_logprobs=part.top_logprobs,
        mean=part.mean,
        times=times_from_pb(part.times) if part.HasField("times") else None,
    )


def batch_orders(next_order: Callable[[], pb.RouterMessage | None]) -> pb.RouterMessage | None:
    """Pack waiting orders into one message, since each costs gRPC about as much as the decisions on a whole request.

    None when there are none.
    """
    batch: list[pb.RouterMessage] = []
    num_bytes = 0
    while num_bytes < _MOST_BYTES_TOGETHER and (order := next_order()) is not None:
        batch.append(order)
        num_bytes += order.ByteSize()
    if len(batch) > 1:
        return pb.RouterMessage(orders=pb.Orders(orders=batch))
    return batch[0] if batch else None


def cancel_to_pb(request_id: RequestId, attempt: int) -> pb.RouterMessage:
    """Make the message that ends one attempt."""
    return pb.RouterMessage(cancel=pb.Cancel(request_id=request_id, attempt=attempt))


def reroute_to_pb(request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> pb.RouterMessage:
    """Make the answer to a TransferFailed."""
    route = None if prefill is None else _route_to_pb(prefill)
    return pb.RouterMessage(reroute=pb.Reroute(request_id=request_id, attempt=attempt, prefill=route))


def _route_to_pb(route: PrefillRoute) -> pb.PrefillRoute:
    return pb.PrefillRoute(
        worker_id=route.worker.worker_id,
        incarnation=route.worker.incarnation,
        address=route.address,
        transfer_id=route.transfer_id,
        attempt=route.attempt,
        holder=holder_to_pb(route.holder),
    )


def tokens_from_pb(delta: pb.TokenDelta) -> TokensArrived:
    """Convert one attempt's share of a step. Raises ProtocolError when log probabilities and tokens do not match up."""
    token_ids, logprobs = delta.token_ids, delta.logprobs
    if logprobs:
        if len(logprobs) != len(token_ids):
            raise ProtocolError(f"{len(token_ids)} tokens with {len(logprobs)} logprobs")
        tokens = tuple(token_from_pb(t, p) for t, p in zip(token_ids, logprobs, strict=True))
    else:
        tokens = tuple(map(bare_token, token_ids))
    started = None
    if delta.HasField("started"):
        started = AttemptStarted(cached_tokens=delta.started.cached_tokens, times=times_from_pb(delta.started.times))
    finished = _finished_from_pb(delta.finish) if delta.HasField("finish") else None
    prediction = None
    if delta.HasField("prediction"):
        prediction = PredictionUse(delta.prediction.accepted, delta.prediction.rejected)
    return TokensArrived(delta.first_index, tokens, started, finished, prediction)


def _finished_from_pb(finish: pb.Finish) -> AttemptFinished:
    reason = finish_reason_from_pb(finish.reason)
    return AttemptFinished(
        reason=reason,
        cached_tokens=finish.cached_tokens,
        times=times_from_pb(finish.times),
        failure=failure_from_pb(finish.failure) if reason is FinishReason.ERROR else None,
    )


def refused_from_pb(refused: pb.Refused) -> AttemptRefused:
    """Convert a worker's refusal, with its reason."""
    return AttemptRefused(error=failure_from_pb(refused.failure))


def transfer_failed_from_pb(failed: pb.TransferFailed) -> TransferFailed:
    """Convert the report of a hand-off that ended without a commit."""
    return TransferFailed(
        transfer_id=TransferId(failed.transfer_id),
        landed_tokens=failed.landed_tokens,
        reason=failed.reason,
        error=failure_from_pb(failed.failure) if failed.HasField("failure") else None,
    )


def handoff_from_pb(handoff: pb.CommittedHandoff) -> CommittedHandoff:
    """Convert the report of a committed hand-off."""
    return CommittedHandoff(
        prefill=WorkerKey(WorkerId(handoff.worker_id), Incarnation(handoff.incarnation)),
        num_tokens=handoff.num_tokens,
        exposed_s=handoff.exposed_s,
    )


def load_from_pb(load: pb.LoadSnapshot) -> WorkerLoad:
    return WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_reserved=min(load.num_reserved, load.num_waiting),
        backlog_tokens=load.backlog_tokens,
        num_free_blocks=load.num_free_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        kv_bytes_per_s=load.kv_bytes_per_s,
        context_tokens=load.context_tokens,
        num_quarantined_blocks=load.num_quarantined_blocks,
        transfers=transfers_from_pb(load.transfers) if load.HasField("transfers") else None,
        cache_tiers=tuple(map(_tier_from_pb, load.cache_tiers[:_MAX_TIERS])),
        report_number=load.report_number,
        step_age_s=load.step_age_s,
        pins=totals_from_pb(load.pins) if load.HasField("pins") else NO_PINS,
        redis_publishing=(
            _redis_publishing_from_pb(load.redis_publishing) if load.HasField("redis_publishing") else None
        ),
        work=_work_from_pb(load.work) if load.HasField("work") else None,
        resident_adapters=frozenset(load.resident_adapters) if load.resident_adapters else _NO_ADAPTERS,
        adapters=_adapters_from_pb(load) if load.HasField("adapters") else None,
    )


def _adapters_from_pb(load: pb.LoadSnapshot) -> AdapterReport:
    report = load.adapters
    return AdapterReport(
        loads=report.loads,
        evictions=report.evictions,
        failures=report.failures,
        load_seconds=report.load_seconds,
        num_waiting=report.num_waiting,
        num_resident=len(load.resident_adapters),
        held_bytes=report.held_bytes,
        capacity_bytes=report.capacity_bytes,
    )


def _work_from_pb(work: pb.WorkReport) -> EngineWorkReport:
    return EngineWorkReport(
        prefill=_steps_from_pb(work.prefill),
        decode=_steps_from_pb(work.decode),
        preemptions=work.preemptions,
        resident_bytes=work.resident_bytes,
        weights_bytes=work.weights_bytes,
        kv_bytes=work.kv_bytes,
        flops_per_token=work.flops_per_token,
        step_sizes=tuple(work.step_sizes) if len(work.step_sizes) == len(STEP_SIZES) + 1 else (),
        drafts=tuple(_drafts_from_pb(totals) for totals in work.drafts if totals.source in DRAFT_SOURCES),
    )


def _drafts_from_pb(totals: pb.DraftTotals) -> DraftSourceTotals:
    return DraftSourceTotals(
        source=totals.source,
        drafts=totals.drafts,
        draft_tokens=tuple(totals.draft_tokens[:DRAFT_PLACES]),
        accepted_tokens=tuple(totals.accepted_tokens[:DRAFT_PLACES]),
    )


def _steps_from_pb(totals: pb.StepTotals) -> EngineStepTotals:
    return EngineStepTotals(
        steps=totals.steps,
        seconds=totals.seconds,
        tokens=totals.tokens,
        requests=totals.requests,
        draft_tokens=totals.draft_tokens,
        accepted_tokens=totals.accepted_tokens,
    )


def _redis_publishing_from_pb(report: pb.RedisPublisherReport) -> RedisPublishingReport:
    return RedisPublishingReport(
        is_up=report.up, connects=report.connects, entries=report.entries, states=report.states, lag_s=report.lag_s
    )


def _tier_from_pb(tier: pb.CacheTier) -> CacheTierLoad:
    return CacheTierLoad(
        tier=tier.tier if tier.tier in _TIERS else "other",
        num_blocks=tier.num_blocks,
        capacity_blocks=tier.capacity_blocks,
        hits=tier.hits,
        misses=tier.misses,
        stores=tier.stores,
        evictions=tier.evictions,
        stored_bytes=tier.stored_bytes,
        store_s=tier.store_s,
        loaded_bytes=tier.loaded_bytes,
        load_s=tier.load_s,
        dropped=tier.dropped,
        damaged=tier.damaged,
        late=tier.late,
    )


def prefix_change_from_pb(events: pb.KVEvents) -> PrefixChange:
    """Convert changes of a worker's prefix cache."""
    return PrefixChange(
        first_sequence=events.first_sequence,
        snapshot=events.cleared,
        changes=tuple((BlockHash(event.block_hash), event.stored) for event in events.events),
    )


def cache_offer_from_pb(offer: pb.CacheOffer) -> CacheOffer:
    """Convert a draining worker's cache offer. Raises ProtocolError."""
    try:
        chains = chains_from_pb(offer.chains)
    except InvalidRequest as error:
        raise ProtocolError(f"cache_offer: {error.message}") from None
    return CacheOffer(chains=chains, lends_s=min(max(0.0, offer.lends_s), _MAX_OFFER_S))


def fetch_cache_to_pb(share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> pb.RouterMessage:
    order = pb.FetchCache(
        holder=holder_to_pb(share.holder),
        block_size=share.block_size,
        chains=chains_to_pb(share.chains),
        within_s=within_s,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    return pb.RouterMessage(fetch_cache=order)


def migration_ended_to_pb() -> pb.RouterMessage:
    """Make the message that ends a draining worker's migration."""
    return pb.RouterMessage(cache_offer_ended=pb.CacheOfferEnded())


def pin_to_pb(order: PinOrder) -> pb.RouterMessage:
    """Convert an order to pin a prefix."""
    return pb.RouterMessage(pin=order_to_pb(order))


def unpin_to_pb(key: PinKey) -> pb.RouterMessage:
    """Make the order to unpin a prefix."""
    return pb.RouterMessage(unpin=pins_pb.Unpin(tenant=key.tenant, name=key.name))


def resync_to_pb() -> pb.RouterMessage:
    """Make the request for a worker's whole prefix cache."""
    return pb.RouterMessage(resync=pb.Resync())


def migration_source_from_pb(ended: pb.CacheFetched) -> WorkerKey:
    """Return whose cache the target of a migration reports on."""
    return WorkerKey(WorkerId(ended.worker_id), Incarnation(ended.incarnation))


_TRANSPORTS = frozenset({"memory", "shm", "tcp", "torch_dist", "cuda_ipc", "nixl"})
_OUTCOMES = frozenset({"committed", "failed", "expired", "cancelled"})
_MIGRATED = frozenset({"moved", "failed", "held", "computed", "no_room", "no_time"})
_MAX_ENDS = 2 * (len(_TRANSPORTS) + 1) * len(_OUTCOMES)


def transfers_from_pb(report: pb.TransferReport) -> TransferReport:
    return TransferReport(
        sides=(_side_from_pb("sent", report.sent), _side_from_pb("received", report.received)),
        fetches_started=report.fetches_started,
        fetches_completed=report.fetches_completed,
        fetches_failed=report.fetches_failed,
        fetches_declined=report.fetches_declined,
        fetched_tokens=report.fetched_tokens,
        lent_tokens=report.lent_tokens,
        pinned_blocks=report.pinned_blocks,
        leased_blocks=report.leased_blocks,
        quarantined_blocks=report.quarantined_blocks,
        loans=report.loans,
        inherited=tuple(map(_migrated, report.inherited[: len(_MIGRATED)])),
    )


def _migrated(blocks: pb.MigratedBlocks) -> MigratedBlocks:
    return MigratedBlocks(
        outcome=blocks.outcome if blocks.outcome in _MIGRATED else "other",
        num_blocks=blocks.blocks,
        num_bytes=blocks.num_bytes,
    )


def _side_from_pb(direction: str, side: pb.TransferSide) -> TransferSide:
    return TransferSide(
        direction=direction,
        started=side.started,
        ended=tuple(map(_ends_from_pb, side.ended[:_MAX_ENDS])),
        bad_messages=side.bad_messages,
        live=side.live,
        bytes_per_s=side.bytes_per_s,
    )


def _ends_from_pb(ends: pb.TransferEnds) -> TransferEnds:
    unreached = "none" if not ends.transport else "other"
    return TransferEnds(
        kind="fetch" if ends.fetch else "handoff",
        transport=ends.transport if ends.transport in _TRANSPORTS else unreached,
        outcome=ends.outcome if ends.outcome in _OUTCOMES else "other",
        count=ends.count,
        num_bytes=ends.num_bytes,
        seconds=ends.seconds,
        chunks=ends.chunks,
        damaged_chunks=ends.damaged_chunks,
    )
