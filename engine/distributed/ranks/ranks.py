"""The other ranks of a worker as rank 0 sees them, from the first process to the last step."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.packing import RankAdapter
from engine.distributed.links.lost import RankLost
from engine.distributed.ranks.messages import PoolMemory, RankFacts
from engine.distributed.ranks.mirror import Mirror
from engine.model.parallel_group import ParallelGroup, SoloGroup
from engine.types.step_inputs import StepInputs
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLink:
    """Connection to the server of a rank's KV region."""

    sock: socket.socket
    on_cut: Callable[[], None] | None = None
    """For a rank on another node: to be called, on any thread, when the connection has ended; ends the group. None: the
    end of the connection is the end of the rank's process, which others notice."""


class Ranks(Protocol):
    """Interface to the other ranks: `wait_loaded`, `begin_dry_run`, `end_dry_run`, `use_pool`, then `announce` every
    step.

    All may raise RankLost; `close` ends the others and may be called at any time.
    """

    @property
    def group(self) -> ParallelGroup:
        """Group of all ranks, this one included."""
        ...

    @property
    def mirror(self) -> Mirror | None:
        """Mirror of other nodes' parts of the pool, once there is a pool; None when all ranks are on this node."""
        ...

    @property
    def region_links(self) -> dict[int, RegionLink]:
        """Connections to the servers of the other ranks' KV regions; empty where all KV is in one region.

        Whoever uses one takes it out; `close` closes the others.
        """
        ...

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        """Wait until all have loaded their part of the model. Returns the largest weights and least memory of any rank.

        Raises ConfigError when one refuses the model or has loaded another.
        """
        ...

    def begin_dry_run(self, layout: KVLayout) -> None:
        """Make every rank run the steps announced from now on over a pool of one block, and measure them."""
        ...

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        """Most memory that any rank's steps took, in bytes; None when a rank could not measure it."""
        ...

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None:
        """Make every rank create its KV cache: in its part of `memory`, or in memory of its own when that is None.

        `num_host_slots`: number of places in host memory for blocks, of which each rank holds its part.
        """
        ...

    def hold_adapter(self, slot: int, parts: Sequence[RankAdapter] | None) -> None:
        """Make every other rank hold its part of an adapter in a slot; None: nothing."""
        ...

    def announce(self, inputs: StepInputs) -> None:
        """Make every rank compute this step."""
        ...

    def watch(self, listener: Callable[[RankLost], None]) -> None:
        """Call `listener`, on any thread, when a rank has died."""
        ...

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        ...


class SoloRanks:
    """Implements Ranks for a worker of one rank."""

    def __init__(self) -> None:
        self.group = SoloGroup()
        self.mirror: Mirror | None = None
        self.region_links: dict[int, RegionLink] = {}

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        return own

    def begin_dry_run(self, layout: KVLayout) -> None: ...

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        return own_bytes

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None: ...

    def hold_adapter(self, slot: int, parts: Sequence[RankAdapter] | None) -> None: ...

    def announce(self, inputs: StepInputs) -> None: ...

    def watch(self, listener: Callable[[RankLost], None]) -> None: ...

    def close(self) -> None: ...
