"""An engine whose ranks are on two nodes: the same tokens and KV, and an end when a node is lost or frozen."""

import os
import queue
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from engine.assembly import EngineParts, assemble
from engine.distributed.links.heartbeat import SILENCE_S, HeartbeatServer
from engine.distributed.links.listener import NodeListener
from engine.distributed.links.lost import RankLost
from engine.distributed.ranks import leader as leading
from engine.distributed.ranks.leader import Leader
from engine.distributed.ranks.processes import RANK_MODULE
from kv_transfer.memory.shared_memory import SharedPool
from tandem.errors import ConfigError
from tandem.values.ids import BlockId
from tandem.values.sampling import SamplingParams
from tests.integration.engine.test_rank_ends import setup
from tests.integration.engine.test_ranks import BUILTIN, ODD, OUTPUT, generate, request_of, run_step, spec
from tests.support.certificates import Authority
from tests.support.node_processes import OTHER_HOST, another_node, group

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process stands for a worker; it must not be ended because a test is slow to close its ranks."""
    monkeypatch.setattr(leading, "_EXIT_S", 120.0)


def ranks_of(starter) -> list[psutil.Process]:
    """Processes of that node."""
    return [child for child in psutil.Process(starter.pid).children() if RANK_MODULE in child.cmdline()]


def go_on(parts: EngineParts, num_computed_tokens: int) -> list[int]:
    """The continuation of a prompt of 37 tokens with so many cached."""
    request = request_of(range(3, 40), "on")
    request.block_table.extend(BlockId(i) for i in range(8))
    request.num_computed_tokens = num_computed_tokens
    while request.num_output_tokens < OUTPUT:
        run_step(parts, [request])
    return list(request.token_ids)[37:]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_nodes_compute_and_store_the_same_as_one(size: int, tmp_path: Path) -> None:
    given = group(size=size, tls=Authority().issue(tmp_path))
    greedy = SamplingParams(temperature=0.0)
    alone = assemble(spec(BUILTIN, size), pool=SharedPool)
    with another_node(given) as starter:
        together = assemble(spec(BUILTIN, size, nodes=given), pool=SharedPool)
        try:
            assert together.budget.num_blocks == alone.budget.num_blocks == 40
            for params in (greedy, ODD):
                assert generate(together, params) == generate(alone, params)
            mirror = together.ranks.mirror
            assert mirror is not None
            assert alone.ranks.mirror is None
            expected = bytes(alone.kv_memory())
            assert bytes(together.kv_memory()) != expected, "what the other node has written is there alone"
            mirror.fetch_stale(range(40))
            assert bytes(together.kv_memory()) == expected
            # The other way: what a peer has put here, in blocks that it was given, is there before a step reads it.
            tokens = go_on(alone, 0)
            together.kv_memory()[:] = alone.kv_memory()
            mirror.mark_received(range(8))
            assert go_on(together, 36) == tokens
            assert len(ranks_of(starter)) == size // 2
        finally:
            together.ranks.close()
            alone.ranks.close()


@pytest.mark.slow
def test_pool_beyond_a_remote_nodes_memory_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Both are this machine; only rank 0 knows of both.
    monkeypatch.setattr("engine.assembly.free_memory_bytes", lambda: 1 << 60)
    given = group()
    with another_node(given), pytest.raises(ConfigError, match=rf"are free at rank 1 \({re.escape(OTHER_HOST)}\)"):
        assemble(replace(spec(BUILTIN, 2, nodes=given), offload_bytes=1 << 50), pool=SharedPool)


@pytest.mark.slow
def test_frozen_node_is_detected_without_a_closed_connection() -> None:
    given = group()
    with another_node(given) as starter:
        leader = Leader(replace(setup(2), num_nodes=2), given)
        try:
            losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
            leader.watch(losses.put)
            [rank] = ranks_of(starter)
            os.kill(rank.pid, signal.SIGSTOP)
            started = time.monotonic()
            assert f"rank 1 at {OTHER_HOST}" in str(losses.get(timeout=2 * SILENCE_S + WAIT_S))
            print(f"noticed after {time.monotonic() - started:.1f} s")
        finally:
            leader.close()


@pytest.mark.slow
def test_rank_death_on_a_remote_node_ends_the_group_and_the_node_rejoins() -> None:
    given = group(size=4)
    with another_node(given) as starter:
        leader = Leader(replace(setup(4), num_nodes=2), given)
        try:
            losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
            leader.watch(losses.put)
            before = ranks_of(starter)
            os.kill(before[1].pid, signal.SIGKILL)
            # Its neighbour ends with it, at once: either may be seen first.
            assert f"at {OTHER_HOST}" in str(losses.get(timeout=WAIT_S))
            with pytest.raises(RankLost):
                leader.group.all_reduce_(torch.ones(4))
        finally:
            leader.close()
        again = Leader(replace(setup(4), num_nodes=2), given)
        assert not {rank.pid for rank in before} & {rank.pid for rank in ranks_of(starter)}
        starter.terminate()
        again.close()
        assert starter.wait(WAIT_S) == 0


@pytest.mark.slow
def test_node_with_another_secret_logs_it_and_retries() -> None:
    given = group()
    heartbeats = HeartbeatServer(pytest.fail)
    listener = NodeListener(given, heartbeats.serve)
    with another_node(replace(given, secret=b"another secret..")) as starter:
        message = next(line for line in starter.stderr if "cannot reach rank 0" in line)
        assert "does not know this cluster's secret" in message
        assert ranks_of(starter), "the process that answered may end soon"
        starter.terminate()
        assert starter.wait(WAIT_S) == 0
    listener.close()
    heartbeats.close()
