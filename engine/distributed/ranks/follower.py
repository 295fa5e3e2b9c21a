"""A rank other than 0: loads its part of the model, then computes the steps that rank 0 sends until rank 0 ends."""

import json
import logging
import mmap
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from engine.adapters.packing import decode_adapter
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.heartbeat import Pulse
from engine.distributed.links.joining import REFUSED, RankLink, connect_to_rank_0
from engine.distributed.links.lost import RankLost
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.messages import PoolPlan, RankFacts, RankSetup
from engine.distributed.torch_group import OverNodes, TorchGroup
from engine.distributed.wire.mirrored_blocks import Planes, decode_blocks, read_blocks, write_blocks
from engine.distributed.wire.steps import decode_step
from engine.kernels.cpu.threads import threads_per_process
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.gpu_memory import gpu_limit_bytes
from engine.model.loader import load_model
from engine.model.memory_budget import check_share_of_rank, default_limit_bytes
from engine.runner.dry_run import PeakMemory, release_unused_memory
from engine.runner.model_runner import ModelRunner
from tandem.errors import ConfigError
from tandem.process.gpu_host import NvidiaHost
from tandem.process.host_memory import HostRoom, free_memory_bytes
from tandem.rpc.mutual_tls import TlsFiles
from tandem.telemetry.logs import configure

_log = logging.getLogger(__name__)
OnPool = Callable[[PagedKVCache], None]


class ServeRegion(Protocol):
    """Serves a rank's part of the KV pool to rank 0, over a socket, on threads of its own; returns at once."""

    def __call__(
        self, sock: socket.socket, cache: PagedKVCache, *, host: str | None = None, tls: TlsFiles | None = None
    ) -> None:
        """`host`: this node's address, where it is not rank 0's; `tls`: its files then, if rank 0 has any."""
        ...


def join_and_serve(join_fd: int, rank: int, *, source: str | None, serve_region: ServeRegion | None = None) -> int:
    """Join rank 0 on another node and follow it to the end. Returns the exit code.

    `join_fd`: descriptor of a file with the NodeGroup; closed here. `source`: see `connect_to_rank_0`.
    `serve_region`: for a rank that has its KV for itself.
    """
    with os.fdopen(join_fd, "rb") as file:
        group = NodeGroup.from_json(file.read())
    configure("info", f"rank-{rank}")
    try:
        link = connect_to_rank_0(group, rank, source)
    except ConfigError as refusal:
        _log.critical("%s", refusal)
        return REFUSED
    # From now on this process ends with rank 0, which may have work to finish first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if link.region is None:
        return serve_rank(link)
    if serve_region is None:
        link.region.close()
        return serve_rank(link)
    return serve_rank(link, partial(serve_region, link.region, host=link.host, tls=group.tls))


def serve_rank(link: RankLink, on_pool: OnPool | None = None) -> int:
    """Follow rank 0 at the other end of this link to the end. Returns the exit code.

    `on_pool`: called with the KV cache to serve with, once it is there, if this rank has its part for itself.
    """
    channel = link.steps
    pulse = None if link.pulse is None else Pulse(link.pulse)
    try:
        channel.send(ChannelKind.READY)
        payload, store_fd = channel.expect(ChannelKind.SETUP)
        setup = RankSetup.from_json(payload)
        configure(setup.log_level, f"rank-{setup.rank}", setup.log_format)
        over_nodes = None if pulse is None or link.host is None else OverNodes(keys=pulse.keys, host=link.host)
        return _follow(channel, setup, store_fd, over_nodes, on_pool)
    except RankLost as lost:
        # Only a warning: this may be the echo of another rank's death, which rank 0 reports.
        _log.warning("%s", lost)
        return 1


def _follow(
    channel: RankChannel,
    setup: RankSetup,
    store_fd: int | None,
    over_nodes: OverNodes | None,
    on_pool: OnPool | None,
) -> int:
    if store_fd is None and over_nodes is None:
        raise RankLost("the setup has no descriptor of the group's store")
    options = with_own_gpu_first(setup.on_own_machine(threads_per_process), NvidiaHost(os.environ))
    device = options.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(options.num_threads)
    try:
        group = TorchGroup(
            store_fd,
            rank=setup.rank,
            size=setup.size,
            device=device,
            timeout_s=setup.timeout_s,
            fixed_order=options.deterministic,
            over_nodes=over_nodes,
        )
        limit_bytes = _limit_bytes(setup, device)
        model = load_model(setup.model_path, backend=select_backend(options), group=group)
    except ConfigError as refusal:
        channel.send(ChannelKind.REFUSED, str(refusal).encode())
        channel.receive()  # rank 0 ends the group; an earlier exit would look like a death
        return REFUSED
    room = None if over_nodes is None or setup.is_beside_rank_0 else HostRoom(free_memory_bytes(), over_nodes.host)
    facts = RankFacts(
        weights_bytes=model.weights_bytes, fingerprint=model.fingerprint, limit_bytes=limit_bytes, room=room
    )
    channel.send(ChannelKind.LOADED, facts.to_json())
    _Follower(channel, model, on_pool).run()
    return 0


def with_own_gpu_first(options: BackendOptions, host: NvidiaHost) -> BackendOptions:
    """Make the rank's GPU the first of this process: else its threads would begin on another rank's.

    Where rank 0 has not ordered the GPUs either, CUDA's numbers stay. Call it before CUDA is used.
    """
    index = options.device.index
    if options.device.type != "cuda" or not index or not host.is_ordered:
        return options
    host.put_first((index,))
    return replace(options, device=torch.device("cuda", 0))


def _limit_bytes(setup: RankSetup, device: torch.device) -> int | None:
    """Memory limit of this rank, weights included; None where rank 0 knows it. Raises ConfigError."""
    if device.type == "cuda":
        return gpu_limit_bytes(setup.gpu_memory_request, device)
    if setup.is_beside_rank_0:
        return None
    free_bytes = free_memory_bytes() // setup.ranks_per_node
    if setup.configured_bytes is None:
        return default_limit_bytes(free_bytes)
    check_share_of_rank(setup.configured_bytes, free_bytes=free_bytes)
    return setup.configured_bytes


class _Follower:
    """Carries out the commands of rank 0, in order."""

    def __init__(self, channel: RankChannel, model: Decoder, on_pool: OnPool | None = None) -> None:
        self._on_pool = on_pool
        self._channel = channel
        self._model = model
        self._peak = PeakMemory(model.device)
        self._is_measured = False
        self._runner: ModelRunner | None = None

    def run(self) -> None:
        """Carry out commands until rank 0 closes the connection."""
        while (message := self._channel.receive()) is not None:
            kind, payload, fd = message
            match kind:
                case ChannelKind.STEP:
                    self._step(payload)
                case ChannelKind.DRY_RUN:
                    self._use_pool(PoolPlan.from_json(payload), None)
                    self._is_measured = self._peak.start()
                case ChannelKind.MEASURE:
                    growth = self._peak.growth_bytes() if self._is_measured else None
                    self._runner = None
                    release_unused_memory(self._model)
                    self._channel.send(ChannelKind.MEASURED, json.dumps(growth).encode())
                case ChannelKind.POOL:
                    plan = PoolPlan.from_json(payload)
                    runner = self._use_pool(plan, fd)
                    if self._on_pool is not None and plan.layout.num_regions > 1:
                        self._on_pool(runner.kv_cache)
                    self._channel.send(ChannelKind.POOL_READY)
                case ChannelKind.PLACE:
                    planes = self._planes()
                    blocks, data = decode_blocks(payload, num_blocks=planes.shape[1])
                    write_blocks(planes, blocks, data)
                case ChannelKind.FETCH:
                    planes = self._planes()
                    blocks, _ = decode_blocks(payload, num_blocks=planes.shape[1])
                    self._channel.send(ChannelKind.BLOCKS, read_blocks(planes, blocks))
                case ChannelKind.ADAPTER:
                    self._hold_adapter(payload)
                case _:
                    raise RankLost(f"rank 0 sent {kind.name}")

    def _step(self, payload: memoryview) -> None:
        if self._runner is None:
            raise RankLost("rank 0 sent a step before a pool")
        self._runner.compute(decode_step(payload))

    def _hold_adapter(self, payload: memoryview) -> None:
        if (adapters := self._model.adapters) is None:
            raise RankLost("rank 0 sent an adapter to a model that takes none")
        slot, adapter = decode_adapter(payload)
        if adapter is None:
            adapters.drop(slot)
        else:
            adapters.put(slot, adapter)

    def _planes(self) -> Planes:
        """Bytes of the pool, which rank 0 mirrors; they must be in host memory."""
        if self._runner is None or self._model.device.type != "cpu":
            raise RankLost("rank 0 mirrors a pool that is not in host memory")
        return self._runner.kv_cache.blocks.numpy()

    def _use_pool(self, plan: PoolPlan, fd: int | None) -> ModelRunner:
        memory = None if fd is None else _map_part(plan, fd)
        cache = PagedKVCache(plan.layout, num_blocks=plan.num_blocks, device=self._model.device, buffer=memory)
        self._runner = ModelRunner(self._model, cache, num_host_slots=plan.num_host_slots)
        return self._runner


def _map_part(plan: PoolPlan, fd: int) -> memoryview:
    """Map this rank's part of the pool that all ranks share; it stays mapped as long as a view of it exists."""
    size, begin = plan.rank_bytes, plan.layout.tp_rank * plan.rank_bytes
    try:
        whole = memoryview(mmap.mmap(fd, size * plan.layout.tp_size, flags=mmap.MAP_SHARED))
    finally:
        os.close(fd)
    return whole[begin : begin + size]
