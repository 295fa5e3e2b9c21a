"""A group of ranks ends at once in a collective, during start or after its leader's death, and leaves nothing."""

import gc
import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.assembly import assemble
from engine.backends.options import BackendOptions
from engine.distributed.links.lost import RankLost
from engine.distributed.ranks import leader as leading
from engine.distributed.ranks.leader import Leader
from engine.distributed.ranks.messages import RankSetup
from kv_transfer.memory.shared_memory import SharedPool
from tandem.errors import ConfigError
from tests.integration.engine.test_ranks import BUILTIN, children, spec

WAIT_S = 20.0
NEVER_S = 600.0
"""Far beyond any wait here: what ends earlier was not ended by this time-out."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "_EXIT_S", 120.0)


def setup(size: int = 2) -> RankSetup:
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch")
    return RankSetup(rank=0, size=size, model_path=BUILTIN, backend=options, log_level="INFO", timeout_s=NEVER_S)


def open_files() -> list[str]:
    """What this process has open, by name: sockets and memory files without their numbers.

    Garbage of earlier tests is collected first: what the collector happened to close between two of these would differ.
    """
    gc.collect()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0])
        except FileNotFoundError:  # the directory's own
            continue
    return sorted(names)


def test_killed_rank_ends_wait_for_all_reduce() -> None:
    leader = Leader(setup(3))
    try:
        frozen, killed = leader.pids[1], leader.pids[2]
        os.kill(frozen, signal.SIGSTOP)  # so that the sum cannot come to an end
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(leader.group.all_reduce_, torch.ones(4))
            assert not waiting.done()
            started = time.monotonic()
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(RankLost, match="rank 0 lost the other ranks"):
                waiting.result(timeout=WAIT_S)
            print(f"the sum ended after {(time.monotonic() - started) * 1e3:.0f} ms")
    finally:
        leader.close()
    assert children() == []


@pytest.mark.turn(0)
def test_closed_rank_group_leaks_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    Leader(setup()).close()  # torch keeps a few things of its first group
    before = open_files()

    parts = assemble(spec(BUILTIN, 2), pool=SharedPool)
    assert len(children()) == 1
    parts.ranks.close()
    parts.pool.close()
    del parts
    assert open_files() == before, "after serving"

    with pytest.raises(ConfigError):
        assemble(spec(BUILTIN, 2, memory_bytes=16 << 20, num_blocks=None, max_model_len=2048))
    assert open_files() == before, "after a refusal"

    def nobody(*_: object, **__: object) -> None:
        raise RankLost("rank 0 did not join the group")

    monkeypatch.setattr(leading, "TorchGroup", nobody)
    with pytest.raises(RankLost, match="did not join"):
        Leader(setup())
    assert open_files() == before, "after a meeting that failed"
    assert children() == []


def test_rank_killed_during_start_ends_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its start and before it knows what to load, while the leader waits for it to load."""
    meet = Leader._meet

    def kill_and_meet(self: Leader, given: RankSetup):
        group = meet(self, given)
        os.kill(self.pids[1], signal.SIGKILL)
        return group

    monkeypatch.setattr(Leader, "_meet", kill_and_meet)
    started = time.monotonic()
    with pytest.raises(RankLost):
        assemble(spec(BUILTIN, 2))
    print(f"the start ended after {time.monotonic() - started:.3f} s")
    assert children() == []


STARTING = """
import sys
from engine.distributed.ranks.leader import Leader
from tests.integration.engine.test_rank_ends import setup

def wait(self, setup):
    print(*self.pids.values(), flush=True)
    sys.stdin.read()

Leader._meet = wait
Leader(setup(3))
"""


def test_ranks_of_a_leader_killed_at_start_end() -> None:
    """They may not yet have asked for a signal at its death."""
    leader = subprocess.Popen(
        [sys.executable, "-c", STARTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    with leader:
        followers = [os.pidfd_open(int(pid)) for pid in leader.stdout.readline().split()]
        assert len(followers) == 2
        leader.kill()
        for follower in followers:
            assert select.select([follower], [], [], WAIT_S)[0], "a rank outlived rank 0"
            os.close(follower)


HELD = """
import gc, os, socket, torch
from engine.distributed.torch_group import TorchGroup

fd = os.memfd_create("store")
group = TorchGroup(rank=0, size=1, store_fd=fd, device=torch.device("cpu"), timeout_s=5.0)
held = group._backend
group.close()
ours, theirs = socket.socketpair()
assert fd in (ours.fileno(), theirs.fileno()), "its number is another file's now"
del held
gc.collect()
print("lived on")
"""


def test_lingering_reference_to_closed_group_is_harmless() -> None:
    """As an exception in flight holds one. On destruction torch's store opens its file by descriptor number."""
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "lived on\n"), done.stderr
