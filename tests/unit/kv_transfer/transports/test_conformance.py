"""The conformance suite: every transport passes all of it."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from kv_transfer.memory import landing as landing_module
from kv_transfer.memory.checksum import checksum_of
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.catalogue import NAMES, candidates, open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from kv_transfer.transports.interface import KVReceiver, KVSender, PeerWriter, WriteOrder
from kv_transfer.transports.tcp import receiver as tcp_receiver
from kv_transfer.transports.tcp import sender as tcp_sender
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.errors import TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.values.ids import TransferId
from tests.support.certificates import Authority
from tests.support.kv_transfer.device_fakes import HostSharing, on_device
from tests.support.kv_transfer.transport_needs import open_files, require
from tests.support.kv_transfer.transport_peer import (
    LAYOUT,
    NUM_BLOCKS,
    PAIRING,
    block_views,
    cell_range,
    landing,
    make_region,
    order,
)

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
MODES = (
    *NAMES,
    "tcp streams",
    "tcp without a compiler",
    "tls",
    "tls streams",
    "shm from a device",
    "tcp between devices",
    "torch_dist between devices",
    "torch_dist from a device",
    "nixl between devices",
    "nixl from a device",
    "nixl to a device",
)
"""Each transport, `tcp` in its other ways, and pools that are not in host memory."""


AWAY = {
    "cuda_ipc": ("device", "device"),
    "shm from a device": ("device", "host"),
    "tcp between devices": ("device", "device"),
    "torch_dist between devices": ("device", "device"),
    "torch_dist from a device": ("device", "host"),
    "nixl between devices": ("device", "device"),
    "nixl from a device": ("device", "host"),
    "nixl to a device": ("host", "device"),
}
"""Where the source's and the target's pools are, when that is not in host memory."""


@dataclass
class Pair:
    target: KVRegion
    """As host memory, wherever it claims to be; `source` too."""
    source: KVRegion
    lands_in: KVRegion
    receiver: KVReceiver
    sender: KVSender
    writer: PeerWriter
    quiet: list[TransferKey]
    quieted: threading.Event


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority().issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest, files: TlsFiles) -> Iterator[Pair]:
    with opened(request.param, files) as pair:
        yield pair


def way(mode: str, files: TlsFiles) -> tuple[str, TcpSettings]:
    """The transport's name, and how `tcp` is opened."""
    tls = TlsIdentity(files) if "tls" in mode else None
    streams = 3 if "streams" in mode else 1
    name = next((name for name in NAMES if mode.startswith(name)), "tcp")
    return name, TcpSettings(streams=streams, tls=tls)


@contextmanager
def opened(mode: str, files: TlsFiles) -> Iterator[Pair]:
    source_at, target_at = AWAY.get(mode, ("host", "host"))
    name, tcp = way(mode, files)
    require(name)
    with pytest.MonkeyPatch.context() as patch:
        if "without a compiler" in mode:
            for module in (landing_module, tcp_receiver, tcp_sender):
                patch.setattr(module, "load_mover", lambda: None)
        with opened_as(name, tcp, source_at, target_at) as pair:
            yield pair


@contextmanager
def opened_as(name: str, tcp: TcpSettings, source_at: str, target_at: str) -> Iterator[Pair]:
    source, target = make_region(seed=1), make_region(seed=0)
    lands_in = on_device(target) if target_at == "device" else target
    leaves = on_device(source) if source_at == "device" else source
    shared = {"fabric": MemoryFabric(), "sharing": HostSharing(target.fd), "tcp": tcp}
    [receiver] = open_receivers(lands_in, choice=name, **shared)
    quiet: list[TransferKey] = []
    quieted = threading.Event()
    receiver.listen_quiet(lambda key: (quiet.append(key), quieted.set()))
    [(sender, offer)] = candidates([receiver.offer()], open_senders(leaves, choice=name, **shared))
    writer = sender.connect(offer, PAIRING)
    try:
        yield Pair(target, source, lands_in, receiver, sender, writer, quiet, quieted)
    finally:
        writer.close()
        receiver.close()
        os.close(source.fd)
        os.close(target.fd)


def block_bytes(region: KVRegion, blocks: list[int]) -> bytes:
    return b"".join(block_views(region, blocks))


def arrive(pair: Pair, order: WriteOrder) -> None:
    """Write, and have it verified: then, and not sooner everywhere, it is in place."""
    result = pair.writer.write(order).result(WAIT_S)
    assert pair.receiver.verify(order.key, order.cells, result.checksum)


def assert_refused(pair: Pair, *args: object) -> None:
    with pytest.raises(TransferError):
        pair.writer.write(order(*args)).result(WAIT_S)


def test_transport_bytes_land_exactly(pair: Pair) -> None:
    rng = random.Random(0)
    destinations = rng.sample(range(NUM_BLOCKS), 10)
    sources = [3, 4, 5, 9, 1, 2, 20, 21, 22, 0]
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, *destinations))
    result = pair.writer.write(order(KEY, grant, cell_range(0, 10), sources)).result(WAIT_S)
    assert pair.receiver.verify(KEY, cell_range(0, 10), result.checksum)
    assert block_bytes(pair.target, destinations) == block_bytes(pair.source, sources)
    assert result.num_bytes == 10 * LAYOUT.block_bytes
    others = [b for b in range(NUM_BLOCKS) if b not in destinations]
    assert not any(block_bytes(pair.target, others))


def test_transport_layers_and_blocks_can_be_split(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 7, 3, 12, 11))
    for layer in range(LAYOUT.num_layers):
        for first in (2, 0):
            cells = cell_range(first, 2, first_layer=layer, num_layers=1)
            arrive(pair, order(KEY, grant, cells, [first, first + 1]))
    assert block_bytes(pair.target, [7, 3, 12, 11]) == block_bytes(pair.source, [0, 1, 2, 3])


def test_transport_concurrent_transfers_do_not_mix(pair: Pair) -> None:
    rng = random.Random(1)
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    keys = [TransferKey(transfer_id=TransferId(f"t{i}"), attempt=i) for i in range(8)]
    orders = []
    for i, key in enumerate(keys):
        grant = pair.receiver.open_grant(key, landing(pair.lands_in, *blocks[3 * i : 3 * i + 3]))
        orders += [order(key, grant, cell_range(j, 1), [(3 * i + j) % 20]) for j in range(3)]
    for one, future in [(one, pair.writer.write(one)) for one in orders]:
        assert pair.receiver.verify(one.key, one.cells, future.result(WAIT_S).checksum)
    assert block_bytes(pair.target, blocks) == block_bytes(pair.source, [i % 20 for i in range(24)])


def test_transport_changed_bytes_are_not_verified(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 3, 1))
    for cells, sources in ((cell_range(0, 1), [5]), (cell_range(1, 1), [6])):
        result = pair.writer.write(order(KEY, grant, cells, sources)).result(WAIT_S)
        assert not pair.receiver.verify(KEY, cells, result.checksum ^ (1 << sources[0]))
        result = pair.writer.write(order(KEY, grant, cells, sources)).result(WAIT_S)
        assert pair.receiver.verify(KEY, cells, result.checksum)
    assert block_bytes(pair.target, [3, 1]) == block_bytes(pair.source, [5, 6])


def test_transport_after_revocation_nothing_lands(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1, 2))
    pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    if not pair.receiver.revoke(KEY):
        assert pair.quieted.wait(WAIT_S)
        assert pair.quiet == [KEY]
    assert_refused(pair, KEY, grant, cell_range(1, 1), [6])
    assert not any(block_bytes(pair.target, [2]))
    assert pair.receiver.revoke(KEY)
    other = replace(KEY, attempt=2)
    fresh = pair.receiver.open_grant(other, landing(pair.lands_in, 2))
    arrive(pair, order(other, fresh, cell_range(0, 1), [6]))
    assert block_bytes(pair.target, [2]) == block_bytes(pair.source, [6])


def test_transport_unused_grant_is_revoked_at_once(pair: Pair) -> None:
    pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    assert pair.receiver.revoke(KEY)
    assert pair.receiver.revoke(replace(KEY, attempt=9))


def test_transport_revocation_during_writes_is_final(pair: Pair) -> None:
    for attempt in range(1, 30):
        key = replace(KEY, attempt=attempt)
        grant = pair.receiver.open_grant(key, landing(pair.lands_in, *range(NUM_BLOCKS)))
        pair.quieted.clear()
        futures = [pair.writer.write(order(key, grant, cell_range(0, 20), list(range(20)))) for _ in range(4)]
        if not pair.receiver.revoke(key):
            assert pair.quieted.wait(WAIT_S)
        pair.target.buffer[:] = bytes(pair.target.buffer.nbytes)
        for future in futures:
            with suppress(TransferError):
                future.result(WAIT_S)
        assert not any(pair.target.buffer), "bytes landed after the proof"


def test_transport_cancel_stops_reading_sources(pair: Pair) -> None:
    pattern = bytes(pair.source.buffer)
    for attempt in range(1, 30):
        pair.source.buffer[:] = bytes([attempt]) * len(pattern)
        key = replace(KEY, attempt=attempt)
        grant = pair.receiver.open_grant(key, landing(pair.lands_in, *range(20)))
        futures = [pair.writer.write(order(key, grant, cell_range(0, 20), list(range(20)))) for _ in range(4)]
        if pair.writer.cancel(key):
            assert all(future.done() for future in futures)
        for future in futures:
            with suppress(TransferError):
                future.result(WAIT_S)
        pair.source.buffer[:] = b"\xee" * len(pattern)
        pair.quieted.clear()
        if not pair.receiver.revoke(key):
            assert pair.quieted.wait(WAIT_S)
        assert b"\xee" not in bytes(pair.target.buffer), "read after the cancel"
    pair.source.buffer[:] = pattern
    last = replace(KEY, attempt=99)
    grant = pair.receiver.open_grant(last, landing(pair.lands_in, 4))
    arrive(pair, order(last, grant, cell_range(0, 1), [7]))
    assert block_bytes(pair.target, [4]) == block_bytes(pair.source, [7])


def test_transport_wrong_token_is_refused(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    forged = bytes([grant[0] ^ 1]) + grant[1:]
    assert_refused(pair, KEY, forged, cell_range(0, 1), [5])
    assert_refused(pair, KEY, b"", cell_range(0, 1), [5])
    assert not any(pair.target.buffer)
    pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)


@pytest.mark.parametrize(
    "cells",
    [cell_range(1, 1), cell_range(0, 2), cell_range(0, 1, first_layer=3, num_layers=1), cell_range(0, 1, num_layers=4)],
)
def test_transport_cells_outside_reservation_are_refused(pair: Pair, cells: object) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    assert_refused(pair, KEY, grant, cells, [5] * cells.num_units)
    assert not any(pair.target.buffer)
    pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)


def test_transport_sources_outside_pool_are_refused(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    assert_refused(pair, KEY, grant, cell_range(0, 1), [NUM_BLOCKS])


def test_transport_receiver_death_fails_writes(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    pair.receiver.close()
    assert_refused(pair, KEY, grant, cell_range(0, 1), [5])


def test_transport_sender_end_proves_quiet(pair: Pair) -> None:
    grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
    pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    pair.writer.close()
    if not pair.receiver.revoke(KEY):
        assert pair.quieted.wait(WAIT_S)


def test_transport_connecting_without_secret_is_refused(pair: Pair) -> None:
    offer = pair.receiver.offer()
    middle = offer.advert[:-10] + b"0" * 8 + offer.advert[-2:]
    forged = bytes(16) + offer.advert[16:] if offer.name in ("memory", "shm", "cuda_ipc") else middle
    with pytest.raises(TransferError):
        pair.sender.connect(replace(offer, advert=forged), PAIRING)
    with pytest.raises(TransferError):
        pair.sender.connect(replace(offer, advert=b"nonsense"), PAIRING)


@pytest.mark.parametrize("mode", MODES)
def test_transport_close_leaks_no_threads_or_descriptors(mode: str, files: TlsFiles) -> None:
    with opened(mode, files):
        pass
    gc.collect()
    threads, files_open = set(threading.enumerate()), open_files()
    for _ in range(5):
        with opened(mode, files) as pair:
            grant = pair.receiver.open_grant(KEY, landing(pair.lands_in, 1))
            pair.writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
            del pair
    gc.collect()
    # Of what an earlier test left behind some may end meanwhile.
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files_open


class Peer:
    """The sending side in a process of its own."""

    def __init__(self, offer: TransportOffer, tcp: TcpSettings, files: TlsFiles) -> None:
        args = [offer.name, offer.advert.hex(), offer.host_id, str(tcp.streams)]
        if tcp.tls is not None:
            args += map(str, (files.cert, files.key, files.ca))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_transfer.transport_peer", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()


def freeze(process: "subprocess.Popen[str]") -> None:
    """Returns when it is stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


FROZEN = {"shm": None, "nixl": "late", "torch_dist": "at once", "tcp": "at once", "tls streams": "at once"}
"""When a revocation is proven whose writer is frozen: one with a mapping proves nothing, with NIXL it is shut out."""


@pytest.fixture(params=FROZEN)
def remote(
    request: pytest.FixtureRequest, files: TlsFiles
) -> Iterator[tuple[KVRegion, KVReceiver, Peer, threading.Event]]:
    require(request.param)
    target = make_region(seed=0)
    name, tcp = way(request.param, files)
    [receiver] = open_receivers(target, choice=name, tcp=tcp)
    quieted = threading.Event()
    receiver.listen_quiet(lambda _key: quieted.set())
    peer = Peer(receiver.offer(), tcp, files)
    yield target, receiver, peer, quieted
    peer.process.kill()
    peer.process.communicate()
    receiver.close()
    os.close(target.fd)


def test_transport_works_between_processes_and_survives_a_kill(remote) -> None:
    target, receiver, peer, quieted = remote
    grant = receiver.open_grant(KEY, landing(target, 9, 8, 1, 2))
    peer.ask(f"write {grant.hex()} 0 4")
    assert peer.answer() == f"done {checksum_of(block_views(target, [9, 8, 1, 2]))}"
    expected = make_region(seed=5)
    assert block_bytes(target, [9, 8, 1, 2]) == block_bytes(expected, [0, 1, 2, 3])
    os.close(expected.fd)
    freeze(peer.process)
    proof = FROZEN[receiver.name]
    proven = receiver.revoke(KEY)
    assert proven is (proof == "at once")
    assert not quieted.is_set()
    if proof == "late":
        assert quieted.wait(WAIT_S), "it was shut out"
        target.buffer[:] = bytes(target.buffer.nbytes)
        peer.process.send_signal(signal.SIGCONT)
        peer.ask(f"write {grant.hex()} 0 4")
        assert peer.answer().startswith("failed")
        assert not any(target.buffer), "bytes landed after the proof"
    peer.process.kill()
    assert proven or quieted.wait(WAIT_S), "its death does"
