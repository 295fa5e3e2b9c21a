"""Builds a choice's orders to workers and its trace spans from its state. Pure."""

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from router.placement.placer import Assignment
from router.types.requests import RoutedRequest
from router.types.session_events import PrefillRoute
from router.types.worker_view import WorkerSnapshot
from tandem.telemetry.tracing import Attribute
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, RequestId, TransferId

_NAME_BITS = 64
UNREAD_TOKENS_PER_MESSAGE = 32
"""Tokens per message of an unstreamed answer: at most this many are generated again when its worker is lost."""


def block_names(
    request: RoutedRequest, prompt_names: list[BlockHash], generated: Sequence[int], hasher: BlockHasher
) -> list[BlockHash]:
    """Return the names of the prompt's blocks, which are known, and of what the client has."""
    if not generated:
        return prompt_names
    names = list(prompt_names)
    hasher.extend(request.hash_root, names, [*request.prompt_token_ids, *generated])
    return names


def first_route(request_id: RequestId, attempt: int, assignment: Assignment, rng: Random) -> PrefillRoute | None:
    """Return where the prompt is computed at first; None: where it is decoded.

    Routers that continue a stream from the same position use equal attempt numbers, and their hand-offs may meet at a
    worker: so a hand-off's name contains more than the number.
    """
    if (prefill := assignment.placement.prefill) is None:
        return None
    return PrefillRoute(
        worker=prefill.info.key,
        address=prefill.info.handoff_address,
        transfer_id=TransferId(f"{request_id}.{attempt}.{rng.getrandbits(_NAME_BITS):x}"),
        attempt=1,
        holder=assignment.holder,
    )


def next_route(route: PrefillRoute, prefill: WorkerSnapshot | None, assignment: Assignment) -> PrefillRoute | None:
    """Return where the prompt is computed after the hand-off from `route` has failed."""
    if prefill is None:
        return None
    return replace(
        route,
        worker=prefill.info.key,
        address=prefill.info.handoff_address,
        attempt=route.attempt + 1,
        holder=assignment.holder,
    )


def trace_placement(
    request: RoutedRequest,
    choice: tuple[int, int],
    assignment: Assignment,
    route: PrefillRoute | None,
    between_s: tuple[float, float],
) -> None:
    """Record a span of one decision, if the request is traced; `choice`: index and attempt."""
    if request.span is None:
        return
    attributes: dict[str, Attribute] = {
        "tandem.choice": choice[0],
        "tandem.attempt": choice[1],
        "tandem.placement.reason": assignment.placement.reason.value,
        "tandem.placement.uncached_tokens": assignment.placement.uncached_tokens,
        "tandem.decode_worker": assignment.decode.worker_id,
    }
    if route is not None:
        attributes["tandem.prefill_worker"] = route.worker.worker_id
        attributes["tandem.transfer.attempt"] = route.attempt
    if assignment.holder is not None:
        attributes["tandem.prefix_holder"] = assignment.holder.worker_id
    request.span.interval("tandem.place", between_s[0], between_s[1], **attributes)
