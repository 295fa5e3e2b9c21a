"""The other ranks of a worker as rank 0 sees them, from the first process to the last step."""

from collections.abc import Callable
from typing import Protocol

from engine.distributed.links.lost import RankLost
from engine.distributed.ranks.messages import PoolMemory, RankFacts
from engine.distributed.ranks.mirror import Mirror
from engine.model.parallel_group import ParallelGroup, SoloGroup
from engine.types.step_inputs import StepInputs
from tandem.values.kv_layout import KVLayout


class Ranks(Protocol):
    """Called in this order: `wait_loaded`, `begin_dry_run`, `end_dry_run`, `use_pool`, then `announce` every step.

    All may raise RankLost; `close` ends the others and may come at any time.
    """

    @property
    def group(self) -> ParallelGroup:
        """Of all ranks, this one included."""
        ...

    @property
    def mirror(self) -> Mirror | None:
        """What keeps other nodes' parts of the pool in rank 0's memory, once there is a pool; None: nothing has to."""
        ...

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        """Until all have their part of the model: the largest weights and the least memory of any rank.

        Raises ConfigError when one refuses the model or has loaded another.
        """
        ...

    def begin_dry_run(self, layout: KVLayout) -> None:
        """Steps announced from now on run over a pool of one block, and are measured."""
        ...

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        """The most memory that any rank's steps took; None when one cannot tell."""
        ...

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None:
        """Have every rank make its KV cache: in its part of `memory`, or in memory of its own when there is none.

        `num_host_slots`: places in host memory for blocks of preempted requests, of each rank its part.
        """
        ...

    def announce(self, inputs: StepInputs) -> None:
        """Have every rank compute this step."""
        ...

    def watch(self, listener: Callable[[RankLost], None]) -> None:
        """Tell `listener`, on any thread, when a rank has died."""
        ...

    def close(self) -> None:
        """End the others. Twice does no harm."""
        ...


class SoloRanks:
    """A worker of one rank: nobody to tell anything."""

    def __init__(self) -> None:
        self.group = SoloGroup()
        self.mirror: Mirror | None = None

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        return own

    def begin_dry_run(self, layout: KVLayout) -> None: ...

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        return own_bytes

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None: ...

    def announce(self, inputs: StepInputs) -> None: ...

    def watch(self, listener: Callable[[RankLost], None]) -> None: ...

    def close(self) -> None: ...
