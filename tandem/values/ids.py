"""Identifiers as distinct types, so that a request is never mistaken for a worker, or a hash for a block."""

import re
from typing import NewType

RequestId = NewType("RequestId", str)
"""Assigned by the router, one per choice of a client request; a client's own id is used by the router only."""

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn at process start: a restarted worker is a new peer."""

BlockId = NewType("BlockId", int)
"""Index of a physical KV block in one worker's pool."""
NO_BLOCK = BlockId(2**31 - 1)
"""In a list of blocks, a place that has none: it is outside every pool."""

BlockHash = NewType("BlockHash", bytes)
"""Sixteen-byte chained, keyed content name of a block; see `tandem.values.block_hash`."""

TransferId = NewType("TransferId", str)
"""Assigned by the router, one for each hand-off of a request."""

_REQUEST_IN_NAME = re.compile(r"(?:score )?(?:\d+:)?([0-9a-f]{32}|[a-z]+-\d+)\b")


def request_of(name: str) -> RequestId | None:
    """The request that a name of a choice, an attempt at it, its scoring or its hand-off belongs to, as its router
    calls it.

    All are made of that: `R-0` is its first choice, `7:R-0` the same in a worker's engine, `R-0.1.9f` a hand-off of
    it, `R/prompt` the scoring of its prompt. None: of no request, as a fetch for which nobody waits.
    """
    found = _REQUEST_IN_NAME.match(name)
    return None if found is None else RequestId(found[1])
