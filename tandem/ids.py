"""Names of things, as distinct types: a request is never mistaken for a worker, nor a hash for a block."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Minted by the router, one per choice of a client request; a client's own id never travels further."""

WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn at process start: a restarted worker is a new peer."""

BlockId = NewType("BlockId", int)
"""Index of a physical KV block in one worker's pool."""

BlockHash = NewType("BlockHash", bytes)
"""Sixteen-byte chained, keyed content name of a block; see `tandem.block_hash`."""

TransferId = NewType("TransferId", str)
"""Minted by the router for one hand-off of one request."""
