"""The engine's interface to a model: launch a step, later collect its tokens; used on the engine's own thread."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.types.request import Batch, SampledToken


class LaunchedStep(Protocol):
    """A launched step, whose tokens can be awaited."""

    def is_over(self) -> bool:
        """Whether `tokens` would return at once. Where the host itself computes, a step is over once launched."""
        ...

    def tokens(self) -> Sequence[SampledToken | None]:
        """Wait for the step: the tokens of each item that samples, in the batch's order. An item has one, and one more
        for each of its drafts: the token after it, if the draft is right.

        A token is None where the logits held NaN or infinity, or nothing finite. An exception ends the engine: after a
        failed step the contents of its blocks are unknown.
        """
        ...


class Runner(Protocol):
    """Executes batches against the paged KV cache that the scheduler's block ids name."""

    def bind_thread(self) -> None:
        """Called once, by the engine's thread, before the first step."""
        ...

    def launch(self, batch: Batch, on_layers: Callable[[int], None] | None = None) -> LaunchedStep:
        """Begin to write the KV of every item's tokens and to sample. The batch is not read after the return.

        Steps are executed in the order of their launches. A batch may be launched before the tokens of the previous one
        are known: an item that starts after its request's last known token computes the one sampled there. An
        exception ends the engine, as in `tokens`.

        `on_layers`: called where the host itself computes, with a number of first layers in which the KV of all items'
        tokens is in the pool, on every rank; not for every layer, and never for the last.
        """
        ...
