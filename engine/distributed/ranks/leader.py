"""Rank 0's side of a group: starts the other ranks, tells them what to load, sends them every step, ends them.

Commands and sums go different ways. Commands travel over a socket pair per rank: an idle rank sleeps in
`read` while there is no request, and the end of the stream is the end of rank 0. Sums go through the group.
Ranks of other nodes are not started here: they connect (see engine.distributed.links.listener), and then
are sent the same.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from engine.adapters.packing import RankAdapter, encode_adapter
from engine.distributed.links.channel import ChannelKind
from engine.distributed.links.heartbeat import START_S
from engine.distributed.links.lost import RankLost
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.channels import Channels, NodeRanks
from engine.distributed.ranks.group_end import GroupEnd
from engine.distributed.ranks.messages import PoolMemory, PoolPlan, RankFacts, RankSetup, combine_facts
from engine.distributed.ranks.mirror import Mirror
from engine.distributed.ranks.processes import RankProcesses
from engine.distributed.ranks.ranks import Ranks, RegionLink, SoloRanks
from engine.distributed.torch_group import TorchGroup
from engine.distributed.wire.steps import encode_step
from engine.types.step_inputs import StepInputs
from tandem.errors import ConfigError
from tandem.values.kv_layout import KVLayout

_log = logging.getLogger(__name__)
_EXIT_S = 0.9
"""Time that this process has to end by itself once a rank has died: a GPU waiting for the dead rank never returns."""


def open_ranks(setup: RankSetup, nodes: NodeGroup | None = None, region_module: str | None = None) -> Ranks:
    """Start and meet the other ranks; `setup` is rank 0's own, `nodes` describes ranks on other nodes.

    `region_module`: module that runs a rank and serves its KV region; None: nothing serves it.

    Raises RankLost, OSError, ConfigError.
    """
    return SoloRanks() if setup.size == 1 else Leader(setup, nodes, region_module)


class Leader:
    """Implements Ranks. Used by one thread at a time, except `watch` and `close`."""

    def __init__(self, setup: RankSetup, nodes: NodeGroup | None = None, region_module: str | None = None) -> None:
        with ExitStack() as undo:
            self._end = GroupEnd(exit_s=_EXIT_S)
            self._channels = Channels()
            undo.callback(self._channels.close)
            self._end.watch(lambda _lost: self._channels.hang_up())
            arrivals = None if nodes is None else NodeRanks(nodes, self._end)
            if arrivals is not None:
                undo.callback(arrivals.close)
            self._arrivals = arrivals
            self._mirror: Mirror | None = None
            num_here = setup.size if nodes is None else nodes.ranks_per_node
            commands = self._channels.open_pairs(range(1, num_here), arrivals, region_module)
            self._processes = RankProcesses(commands, self._end)
            undo.callback(self._processes.close)
            self._channels.close_far_ends()
            if arrivals is not None:
                on_cut = None if region_module is None else self._on_cut
                self._channels.add(arrivals.gather(), on_cut=on_cut)
            self.group = self._meet(setup)
            undo.pop_all()
        _log.info("%d ranks, local pids %s", setup.size, [os.getpid(), *self._processes.pids.values()])

    @property
    def mirror(self) -> Mirror | None:
        return self._mirror

    @property
    def region_links(self) -> dict[int, RegionLink]:
        return self._channels.regions

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids of the other ranks on this node."""
        return self._processes.pids

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        all_facts = [own, *(RankFacts.from_json(answer) for answer in self._channels.collect(ChannelKind.LOADED))]
        for rank, facts in enumerate(all_facts):
            if facts.fingerprint != own.fingerprint:
                raise ConfigError(f"rank {rank} has loaded another model than rank 0 from the same directory")
        return combine_facts(all_facts)

    def begin_dry_run(self, layout: KVLayout) -> None:
        self._send_plans(ChannelKind.DRY_RUN, PoolPlan(layout=layout, num_blocks=1), None)

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        self._channels.send(ChannelKind.MEASURE)
        measured = [own_bytes, *(json.loads(bytes(answer)) for answer in self._channels.collect(ChannelKind.MEASURED))]
        known = [value for value in measured if value is not None]
        return max(known) if len(known) == len(measured) else None

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None:
        plan = PoolPlan(layout=layout, num_blocks=num_blocks, num_host_slots=num_host_slots)
        self._send_plans(ChannelKind.POOL, plan, None if memory is None else memory.fd)
        self._channels.collect(ChannelKind.POOL_READY)
        if memory is not None and (elsewhere := self._channels.elsewhere):
            self._mirror = Mirror(elsewhere, plan, memory.buffer)
        self._channels.set_timeout(self._timeout_s)

    def hold_adapter(self, slot: int, parts: Sequence[RankAdapter] | None) -> None:
        def of_rank(rank: int) -> bytes:
            return encode_adapter(slot, None if parts is None else parts[rank])

        self._channels.send_each(ChannelKind.ADAPTER, of_rank, fd=None)

    def announce(self, inputs: StepInputs) -> None:
        if self._mirror is not None:
            self._mirror.send_missing(inputs)
        self._channels.send(ChannelKind.STEP, encode_step(inputs))

    def watch(self, listener: Callable[[RankLost], None]) -> None:
        self._end.watch(listener)

    def close(self) -> None:
        self._processes.close()
        if self._arrivals is not None:
            self._arrivals.close()
        self._channels.close()
        self.group.close()

    def _on_cut(self, rank: int) -> None:
        """End the group, because the connection for a rank's KV has ended."""
        lost = RankLost(f"rank {rank}: the connection for its KV has ended")
        threading.Thread(target=self._end.report, args=(lost,), name="tandem-rank-cut", daemon=True).start()

    def _meet(self, setup: RankSetup) -> TorchGroup:
        self._timeout_s = setup.timeout_s
        self._channels.set_timeout(START_S)
        self._channels.collect(ChannelKind.READY)
        # Loading a model and zeroing a pool take long; a death ends the wait.
        self._channels.set_timeout(None)
        over_nodes = None if self._arrivals is None else self._arrivals.over_nodes()
        # Without a name: no other process can open it, and nothing is left behind.
        store_fd = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC) if over_nodes is None else None
        try:
            self._channels.send_each(ChannelKind.SETUP, lambda rank: setup.of_rank(rank).to_json(), fd=store_fd)
            return TorchGroup(
                store_fd,
                rank=0,
                size=setup.size,
                device=setup.of_rank(0).backend.device,
                timeout_s=setup.timeout_s,
                fixed_order=setup.backend.deterministic,
                over_nodes=over_nodes,
            )
        except BaseException:
            if store_fd is not None:
                os.close(store_fd)
            raise

    def _send_plans(self, kind: ChannelKind, plan: PoolPlan, fd: int | None) -> None:
        def of_rank(rank: int) -> bytes:
            return replace(plan, layout=replace(plan.layout, tp_rank=rank)).to_json()

        self._channels.send_each(kind, of_rank, fd=fd)
