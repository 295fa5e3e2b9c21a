"""A receiver that dies or freezes during writes: nothing hangs, and sources are quiet at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.catalogue import candidates, open_senders
from kv_transfer.transports.interface import PeerWriter
from kv_transfer.transports.torch_dist.receiver import TorchDistReceiver
from kv_transfer.transports.torch_dist.sender import TorchDistSender
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.device_fakes import on_device
from tests.support.kv_transfer.transport_needs import require
from tests.support.kv_transfer.transport_peer import PAIRING, block_views, cell_range, landing, make_region, order

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
STALL_S = 0.5
MANY = 1024
"""Blocks of a chunk that takes a while."""


class Victim:
    """A receiver in a process of its own, a writer connected to it, and a grant for all its blocks."""

    def __init__(self, name: str, source: KVRegion) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_transfer.transport_peer", name, str(MANY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        advert, host_id, grant = self.process.stdout.readline().split()
        offer = TransportOffer(name=name, advert=bytes.fromhex(advert), host_id=host_id if host_id != "-" else "")
        self.grant = bytes.fromhex(grant)
        senders = (
            [TorchDistSender(source, stall_s=STALL_S)] if name == "torch_dist" else open_senders(source, choice=name)
        )
        [(sender, offer)] = candidates([offer], senders)
        self.writer: PeerWriter = sender.connect(offer, PAIRING)

    def write(self) -> object:
        return self.writer.write(order(KEY, self.grant, cell_range(0, MANY), list(range(MANY)), pool_blocks=MANY))


@contextmanager
def victim(name: str) -> Iterator[Victim]:
    require(name)
    source = make_region(seed=1, num_blocks=MANY)
    one = Victim(name, source)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()
        one.writer.close()
        os.close(source.fd)


@pytest.mark.parametrize("name", ["shm", "nixl", "torch_dist", "tcp"])
def test_peer_loss_killed_receiver_fails_present_and_later_writes(name: str) -> None:
    with victim(name) as peer:
        peer.write().result(WAIT_S)
        futures = [peer.write() for _ in range(80)]
        peer.process.kill()
        peer.process.wait(WAIT_S)
        errors = [future.exception(WAIT_S) for future in futures]
        until = time.monotonic() + WAIT_S
        while errors[-1] is None and time.monotonic() < until:  # the kill may come after the last of them
            errors.append(peer.write().exception(WAIT_S))
        assert isinstance(errors[-1], TransferError)
        assert all(error is None or isinstance(error, TransferError) for error in errors)
        with pytest.raises(TransferError):
            peer.write().result(WAIT_S)
        while not peer.writer.closed and time.monotonic() < until + WAIT_S:  # the reader of its socket may run later
            os.sched_yield()
        assert peer.writer.closed


def pools_mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:")


def test_peer_loss_closed_writer_unmaps_dead_peers_memory() -> None:
    """Although something still references the writer, as the garbage collector does with cycles."""
    with victim("shm") as peer:
        peer.write().result(WAIT_S)
        peer.process.kill()
        peer.process.wait(WAIT_S)
        mapped, opened = pools_mapped(), len(os.listdir("/proc/self/fd"))
        peer.writer.close()
        assert pools_mapped() == mapped - 1
        assert len(os.listdir("/proc/self/fd")) <= opened - 2, "the socket and what mmap had kept"
        assert isinstance(peer.write().exception(WAIT_S), TransferError)


@pytest.mark.parametrize("name", ["nixl", "torch_dist"])
def test_peer_loss_frozen_receiver_holds_sources_until_connection_ends(
    name: str,
) -> None:
    with victim(name) as peer:
        peer.write().result(WAIT_S)
        peer.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
        futures = [peer.write() for _ in range(80)]
        with suppress(TimeoutError, TransferError):
            futures[0].result(0.2)
        quiet = peer.writer.cancel(KEY)
        assert quiet is all(future.done() for future in futures), "what is not quiet is reported later"
        peer.writer.close()
        for future in futures:
            assert future.exception(0) is None or isinstance(future.exception(0), TransferError)


@pytest.mark.parametrize("place", [lambda region: region, on_device])
def test_peer_loss_broken_communicator_is_replaced(place: Callable[[KVRegion], KVRegion]) -> None:
    source, target = make_region(seed=1, num_blocks=MANY), make_region(seed=0, num_blocks=MANY)
    lands_in = place(target)
    receiver = TorchDistReceiver(lands_in, stall_s=STALL_S)
    sender = TorchDistSender(place(source), stall_s=STALL_S)
    writer = sender.connect(receiver.offer(), PAIRING)
    chunks = []
    for attempt in (1, 2, 3):
        key = replace(KEY, attempt=attempt)
        grant = receiver.open_grant(key, landing(lands_in, *range(MANY)))
        chunks.append(order(key, grant, cell_range(0, MANY), list(range(MANY)), pool_blocks=MANY))
    writer.write(chunks[0]).result(WAIT_S)
    writer._group.close()
    with pytest.raises(TransferError):
        writer.write(chunks[1]).result(WAIT_S)
    assert not writer.closed
    target.buffer[:] = bytes(target.buffer.nbytes)
    checksum = writer.write(chunks[2]).result(WAIT_S).checksum
    assert receiver.verify(chunks[2].key, chunks[2].cells, checksum)
    assert all(a == b for a, b in zip(block_views(target, range(8)), block_views(source, range(8)), strict=True))
    writer.close()
    receiver.close()
    os.close(source.fd)
    os.close(target.fd)
