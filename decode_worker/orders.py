"""Converts and validates orders of a router."""

from engine.assembly import EngineParts
from engine.types.request import Request
from kv_transfer.session.peer import Route
from tandem.errors import InvalidRequest
from tandem.protocol.wire import prediction_from_pb, prompt_from_pb, sampling_from_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BYTES
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.prefix_holder import PrefixHolder, holder_from_pb

MAX_ID_CHARS = 256


def request_from_pb(submit: pb.Submit, engine_id: RequestId, parts: EngineParts, now_s: float) -> Request:
    """Convert an order to an engine request. Raises InvalidRequest naming the field; the scheduler checks sizes."""
    vocab_size = parts.model.vocab_size
    params = sampling_from_pb(submit.sampling)
    params.validate(vocab_size=vocab_size)
    if len(submit.hash_root) != HASH_BYTES:
        raise InvalidRequest(f"hash_root must have {HASH_BYTES} bytes", param="hash_root")
    if not 0 < len(submit.request_id) <= MAX_ID_CHARS:
        raise InvalidRequest(f"request_id must have 1 to {MAX_ID_CHARS} characters", param="request_id")
    token_ids = prompt_from_pb(submit)
    num_prompt_tokens = len(token_ids)
    prediction = prediction_from_pb(submit)
    given = (
        ("prompt_token_ids", token_ids),
        ("generated_token_ids", submit.generated_token_ids),
        ("prediction", prediction or ()),
    )
    for name, ids in given:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"{name} must be below the vocabulary's {vocab_size}", param=name)
    token_ids.extend(submit.generated_token_ids)
    return Request(
        request_id=engine_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        params=params,
        hash_root=BlockHash(submit.hash_root),
        choice_index=submit.choice_index,
        arrival_s=now_s,
        priority=submit.priority,
        deadline_s=now_s + submit.timeout_s if submit.HasField("timeout_s") else None,
        prediction=prediction,
    )


def route_from_pb(route: pb.PrefillRoute) -> tuple[TransferId, Route]:
    """The hand-off's id and the route to the prefill worker. Raises InvalidRequest."""
    if not 0 < len(route.transfer_id) <= MAX_ID_CHARS or not route.address or not route.worker_id:
        raise InvalidRequest("prefill needs worker_id, address and transfer_id", param="prefill")
    return TransferId(route.transfer_id), Route(
        worker_id=WorkerId(route.worker_id),
        incarnation=Incarnation(route.incarnation),
        address=route.address,
        attempt=route.attempt,
    )


def holder_of(order: pb.Submit | pb.Reroute) -> PrefixHolder | None:
    """The worker that may hold more of the prompt than the one that will compute it. Raises InvalidRequest."""
    part = order.prefill if order.HasField("prefill") else order
    if isinstance(part, pb.Reroute) or not part.HasField("holder"):
        return None
    if not part.holder.worker_id or not part.holder.address:
        raise InvalidRequest("holder needs worker_id and address", param="holder")
    return holder_from_pb(part.holder)
