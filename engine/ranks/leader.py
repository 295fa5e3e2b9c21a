"""Rank 0's side of a group: starts the other ranks, tells them what to load and every step, ends them.

What is said and what is summed go different ways. Words travel over a socket pair per rank: an idle rank sleeps in
`read` for as long as nobody asks anything, and the end of the stream is the end of rank 0. Sums go through the group.
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from engine.parallel.group import RankLost
from engine.parallel.torch_group import TorchGroup
from engine.ranks.channel import Channel, Kind
from engine.ranks.messages import PoolMemory, PoolPlan, RankFacts, RankSetup
from engine.ranks.processes import RankCommand, RankProcesses
from engine.ranks.ranks import Ranks, SoloRanks
from engine.ranks.step_wire import encode_step
from engine.step_inputs import StepInputs
from tandem.errors import ConfigError
from tandem.kv_layout import KVLayout

_log = logging.getLogger(__name__)
_START_S = 120.0
"""For a process to begin: most of it is importing torch."""
_EXIT_S = 0.9
"""For this process to end by itself once a rank has died. A GPU that waits for the dead would keep it for ever."""


def open_ranks(setup: RankSetup) -> Ranks:
    """The ranks beside this one, started and met; `setup` is rank 0's own. Raises RankLost, OSError."""
    return SoloRanks() if setup.size == 1 else Leader(setup)


class Leader:
    """See Ranks. Used by one thread at a time, `watch` and `close` apart."""

    def __init__(self, setup: RankSetup) -> None:
        with ExitStack() as undo:
            self._channels = _Channels(setup.size)
            undo.callback(self._channels.close)
            self._processes = RankProcesses(self._channels.commands(), exit_s=_EXIT_S)
            undo.callback(self._processes.close)
            self._channels.close_far_ends()
            self.group = self._meet(setup)
            undo.pop_all()
        _log.info("%d ranks, pids %s", setup.size, [os.getpid(), *self._processes.pids.values()])

    @property
    def pids(self) -> Mapping[int, int]:
        """Of each other rank's process."""
        return self._processes.pids

    def wait_loaded(self, own: RankFacts) -> RankFacts:
        """See Ranks."""
        everyone = [own, *(RankFacts.from_json(answer) for answer in self._channels.collect(Kind.LOADED))]
        for rank, facts in enumerate(everyone):
            if facts.fingerprint != own.fingerprint:
                raise ConfigError(f"rank {rank} has loaded another model than rank 0 from the same directory")
        free = [facts.free_bytes for facts in everyone if facts.free_bytes is not None]
        return replace(
            own,
            weights_bytes=max(facts.weights_bytes for facts in everyone),
            free_bytes=min(free, default=None),
        )

    def begin_dry_run(self, layout: KVLayout) -> None:
        """See Ranks."""
        self._send_plans(Kind.DRY_RUN, PoolPlan(layout=layout, num_blocks=1), None)

    def end_dry_run(self, own_bytes: int | None) -> int | None:
        """See Ranks."""
        self._channels.send(Kind.MEASURE)
        measured = [own_bytes, *(json.loads(bytes(answer)) for answer in self._channels.collect(Kind.MEASURED))]
        known = [value for value in measured if value is not None]
        return max(known) if len(known) == len(measured) else None

    def use_pool(
        self, layout: KVLayout, num_blocks: int, memory: PoolMemory | None, *, num_host_slots: int = 0
    ) -> None:
        """See Ranks."""
        plan = PoolPlan(layout=layout, num_blocks=num_blocks, num_host_slots=num_host_slots)
        self._send_plans(Kind.POOL, plan, None if memory is None else memory.fd)
        self._channels.collect(Kind.POOL_READY)
        self._channels.set_timeout(self._timeout_s)

    def announce(self, inputs: StepInputs) -> None:
        """See Ranks."""
        self._channels.send(Kind.STEP, encode_step(inputs))

    def watch(self, listener: Callable[[RankLost], None]) -> None:
        """See Ranks."""
        self._processes.watch(listener)

    def close(self) -> None:
        """See Ranks."""
        self._processes.close()
        self._channels.close()
        self.group.close()

    def _meet(self, setup: RankSetup) -> TorchGroup:
        self._timeout_s = setup.timeout_s
        self._channels.set_timeout(_START_S)
        self._channels.collect(Kind.READY)
        # To load a model and to zero a pool take their time; a death ends the wait.
        self._channels.set_timeout(None)
        # Without a name: nobody else can open it, and nothing is left behind.
        store_fd = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
        try:
            self._channels.send_each(Kind.SETUP, lambda rank: setup.of_rank(rank).to_json(), fd=store_fd)
            return TorchGroup(
                store_fd,
                rank=0,
                size=setup.size,
                device=setup.of_rank(0).backend.device,
                timeout_s=setup.timeout_s,
                fixed_order=setup.backend.deterministic,
            )
        except BaseException:
            os.close(store_fd)
            raise

    def _send_plans(self, kind: Kind, plan: PoolPlan, fd: int | None) -> None:
        def of_rank(rank: int) -> bytes:
            return replace(plan, layout=replace(plan.layout, tp_rank=rank)).to_json()

        self._channels.send_each(kind, of_rank, fd=fd)


class _Channels:
    """A channel to every other rank."""

    def __init__(self, size: int) -> None:
        pairs = {rank: socket.socketpair() for rank in range(1, size)}
        self._far_ends = {rank: pair[1] for rank, pair in pairs.items()}
        self._channels = {rank: Channel(pair[0], f"rank {rank}") for rank, pair in pairs.items()}

    def commands(self) -> list[RankCommand]:
        """How each rank is started with its end."""
        prefix = [sys.executable, "-m", "engine.ranks", "--parent-pid", str(os.getpid()), "--control-fd"]
        return [
            RankCommand(rank=rank, argv=[*prefix, str(end.fileno())], fd=end.fileno())
            for rank, end in self._far_ends.items()
        ]

    def close_far_ends(self) -> None:
        """Once the processes have them: a death closes the last copy."""
        for end in self._far_ends.values():
            end.close()

    def set_timeout(self, timeout_s: float | None) -> None:
        """How long to wait for a rank to speak or to listen."""
        for channel in self._channels.values():
            channel.set_timeout(timeout_s)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """The same to all."""
        for channel in self._channels.values():
            channel.send(kind, payload)

    def send_each(self, kind: Kind, payload: Callable[[int], bytes], *, fd: int | None) -> None:
        """To each rank its own."""
        for rank, channel in self._channels.items():
            channel.send(kind, payload(rank), fd=fd)

    def collect(self, kind: Kind) -> Sequence[memoryview]:
        """One answer of each, in order of rank. Raises ConfigError when one refuses."""
        return [channel.expect(kind)[0] for channel in self._channels.values()]

    def close(self) -> None:
        """Close every end that is open here."""
        self.close_far_ends()
        for channel in self._channels.values():
            channel.close()
