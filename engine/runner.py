"""What the engine asks of a model: one synchronous call per step, on the engine's own thread."""

from collections.abc import Sequence
from typing import Protocol

from engine.request import Batch, SampledToken


class Runner(Protocol):
    """Executes batches against the paged KV cache that the scheduler's block ids name."""

    def bind_thread(self) -> None:
        """Called once, by the engine's thread, before the first step."""
        ...

    def execute(self, batch: Batch) -> Sequence[SampledToken]:
        """Write the KV of every item's tokens; return one token per item that samples, in the batch's order.

        An exception ends the engine: after a failed step nobody knows which blocks hold what.
        """
        ...
