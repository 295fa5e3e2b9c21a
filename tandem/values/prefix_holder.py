"""Another worker that holds a prompt's prefix, as the router reports it to workers."""

from dataclasses import dataclass

from tandem.v1 import common_pb2
from tandem.values.ids import Incarnation, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHolder:
    """A worker believed to hold the KV of a prompt's first tokens; a hint, never a promise."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its hand-off service."""
    num_tokens: int


def holder_to_pb(holder: PrefixHolder | None) -> common_pb2.PrefixHolder | None:
    """Convert to a message; None stays absent."""
    if holder is None:
        return None
    return common_pb2.PrefixHolder(
        worker_id=holder.worker_id,
        incarnation=holder.incarnation,
        address=holder.address,
        num_tokens=holder.num_tokens,
    )


def holder_from_pb(message: common_pb2.PrefixHolder) -> PrefixHolder:
    """Convert a message that is present; the reader checks the bounds."""
    return PrefixHolder(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        address=message.address,
        num_tokens=message.num_tokens,
    )
