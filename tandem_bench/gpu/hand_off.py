"""KV hand-off between the pools of two processes: every byte compared, and rates.

On GPUs over cuda_ipc and tcp within one, and over torch_dist (NCCL) between two where there are two. On a CPU the same
runs with small sizes, to check that it works: over tcp and torch_dist (gloo) between pools that claim to be on a
device, and over shm between pools in host memory.

`python -m tandem_bench.gpu.hand_off TRANSPORT WHERE BLOCKS` is the receiving process. It prints its offer and then
answers each line with one word: `grant` (which blanks its pool and grants all of it) with the grant, `verify FIRST
COUNT CHECKSUM` and `compare` with the number of wrong chunks or bytes. A landing accepts each cell once, so every round
has its own grant, like every attempt of a hand-off.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.catalogue import candidates, chunk_bytes_over, open_receivers, open_senders, reaches_device
from kv_transfer.transports.interface import KVReceiver, PeerWriter, WriteOrder
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout
from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.report import figure

LAYOUT = KVLayout(model_fingerprint="x", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
"""Layout of an 8B model: a block is 2 MiB in all layers."""
NUM_BLOCKS, NUM_BLOCKS_SMALL = 512, 8
_CHECKED_BLOCKS = 32
"""Blocks of the checksums that are timed by themselves: a chunk over cuda_ipc."""
ROUNDS = 3
_HOST = "host"
"""Place of a pool that other processes can map; any other is a device's, or a CPU's that claims to be one."""
_SEED = 7
_WAIT_S = 30.0
_BUSY_CYCLES = 500_000_000
"""Cycles of a quarter of a second, many times the work measured during it."""
_NUM_CHECKSUMS = 40
_PAIRING = Pairing.from_layouts(LAYOUT, LAYOUT, wire_dtype=LAYOUT.dtype)


def hand_off(stage: Stage) -> Findings:
    """Measure bytes and rates of the transports that reach the stage's pools."""
    num_blocks = NUM_BLOCKS_SMALL if stage.is_small else NUM_BLOCKS
    num_gpus = 0 if stage.is_small else torch.cuda.device_count()
    if num_gpus:
        pool = TorchPool(_pattern(stage.place, num_blocks), LAYOUT)
        yield figure("copy on the device", _copy_rate(pool.memory), "GB/s")
        yield from _checksum_rates(pool)
        del pool
    for name, here, there in _ways(num_gpus):
        yield from _by(name, _Pool.filled(here, num_blocks), there)
    yield Note(name="hand-off", text=f"two processes, {num_gpus} GPUs; NCCL needs two")


def _ways(num_gpus: int) -> list[tuple[str, str, str]]:
    """Return (transport, place of the source, place of the destination) for each way."""
    if not num_gpus:
        return [("tcp", "cpu", "cpu"), ("torch_dist", "cpu", "cpu"), ("shm", _HOST, _HOST)]
    within = [("cuda_ipc", "cuda:0", "cuda:0"), ("tcp", "cuda:0", "cuda:0")]
    return within if num_gpus < 2 else [*within, ("torch_dist", "cuda:0", "cuda:1")]


def _by(name: str, pool: "_Pool", there: str) -> Findings:
    with _peer(name, pool, there) as peer:
        peer.round()
        rounds = [peer.round() for _ in range(ROUNDS)]
        yield figure(f"{name}: wrong chunks", peer.bad_chunks, "chunks", at_most=0)
        yield figure(f"{name}: wrong bytes", peer.query("compare"), "bytes", at_most=0)
        yield figure(f"{name}: from pool to pool", max(written for written, _ in rounds), "GB/s")
        yield figure(f"{name}: verified", max(verified for _, verified in rounds), "GB/s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """Pool of one process; `memory` is the whole region as uint8."""

    region: KVRegion
    memory: Tensor

    @property
    def num_blocks(self) -> int:
        return self.region.num_blocks

    @classmethod
    def blank(cls, where: str, num_blocks: int) -> "_Pool":
        size = num_blocks * LAYOUT.worker_block_bytes
        if where != _HOST:
            memory = torch.zeros(size, dtype=torch.uint8, device=where)
            return cls(region=KVRegion.on_device(TorchPool(memory, LAYOUT)), memory=memory)
        shared = SharedPool(size)
        memory = torch.frombuffer(shared.buffer, dtype=torch.uint8)
        return cls(region=KVRegion.from_buffer(shared.buffer, LAYOUT, fd=shared.fd), memory=memory)

    @classmethod
    def filled(cls, where: str, num_blocks: int) -> "_Pool":
        pool = cls.blank(where, num_blocks)
        pool.memory.copy_(_pattern(pool.memory.device, num_blocks))
        _await(pool.memory)
        return pool


def _pattern(place: torch.device, num_blocks: int) -> Tensor:
    """Return a pool of random bytes, the same in every process on the same kind of device."""
    generator = torch.Generator(place).manual_seed(_SEED)
    size = num_blocks * LAYOUT.worker_block_bytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=place, generator=generator)


def _await(memory: Tensor) -> None:
    """Wait until previous writes are in the pool: transports do not wait for the stream they were issued on."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _scattered(num_blocks: int) -> tuple[BlockId, ...]:
    """Return the receiver's positions of the sender's blocks, in their order."""
    blocks = [BlockId(block) for block in range(num_blocks)]
    Random(_SEED).shuffle(blocks)
    return tuple(blocks)


def _copy_rate(memory: Tensor) -> float:
    other, best_s = torch.empty_like(memory), float("inf")
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        other.copy_(memory)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started_s)
    return memory.numel() / best_s / 1e9


def _checksum_rates(pool: TorchPool) -> Findings:
    """Measure checksums of chunks while the engine's stream is idle, and while a step runs on it."""
    source = _PAIRING.at_source(0, 0, tuple(map(BlockId, range(_CHECKED_BLOCKS))), pool.num_blocks)
    reads = source.reads(_cells(0, _CHECKED_BLOCKS))
    rates = []
    for cycles in (0, 0, _BUSY_CYCLES):  # the first run loads the kernels
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        started_s = time.perf_counter()
        for _ in range(_NUM_CHECKSUMS):
            pool.checksum(reads)
        rates.append(_NUM_CHECKSUMS * reads.num_bytes / (time.perf_counter() - started_s) / 1e9)
        torch.cuda.synchronize()
    _, alone, busy = rates
    yield figure("checksum", alone, "GB/s")
    yield figure("checksum beside a busy stream", busy, "GB/s")
    yield figure("checksum beside a busy stream: share", busy / alone, "", at_least=0.5)


class _Peer:
    """Receiving process, and the connection to it."""

    def __init__(
        self, process: "subprocess.Popen[str]", writer: PeerWriter, num_blocks: int, chunk_blocks: int
    ) -> None:
        """`chunk_blocks`: blocks of one write; they divide `num_blocks`."""
        self.bad_chunks = 0
        self._chunk_blocks = chunk_blocks
        self._process = process
        self._writer = writer
        self._num_blocks = num_blocks
        self._attempt = 0

    def round(self) -> tuple[float, float]:
        """Write the whole pool under a new grant and have every chunk verified; return GB/s of both."""
        self._attempt += 1
        grant = bytes.fromhex(self.expect("grant"))
        started_s = time.perf_counter()
        firsts = range(0, self._num_blocks, self._chunk_blocks)
        chunks = [(first, self._writer.write(self._order(first, grant))) for first in firsts]
        results = [(first, future.result(_WAIT_S)) for first, future in chunks]
        written_s = time.perf_counter()
        for first, result in results:
            self.bad_chunks += self.query(f"verify {first} {self._chunk_blocks} {result.checksum}")
        verified_s = time.perf_counter()
        num_bytes = sum(result.num_bytes for _, result in results)
        return num_bytes / (written_s - started_s) / 1e9, num_bytes / (verified_s - written_s) / 1e9

    def query(self, line: str) -> int:
        """Return a number from the other process. Raises CannotMeasure when it has ended."""
        return int(self.expect(line))

    def expect(self, line: str) -> str:
        """Return the other process's answer. Raises CannotMeasure when it has ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise CannotMeasure("the receiving process has no pipes")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise CannotMeasure("the receiving process has ended")
        return answer.strip()

    def _order(self, first: int, grant: bytes) -> WriteOrder:
        # As a worker does: the blocks of this chunk alone.
        blocks = tuple(BlockId(block) for block in range(first, first + self._chunk_blocks))
        source = _PAIRING.at_source(0, first, blocks, self._num_blocks)
        return WriteOrder(key=_key(self._attempt), grant=grant, cells=_cells(first, self._chunk_blocks), source=source)


@contextmanager
def _peer(name: str, pool: _Pool, there: str) -> Iterator[_Peer]:
    command = [sys.executable, "-m", "tandem_bench.gpu.hand_off", name, there, str(pool.num_blocks)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        words = process.stdout.readline().split() if process.stdout is not None else []
        if len(words) != 2:
            raise CannotMeasure(f"{name}: the receiving process did not start")
        advert, host_id = words
        senders = open_senders(pool.region, choice=name, isolated_network=True)
        offer = TransportOffer(name=name, advert=bytes.fromhex(advert), host_id=bytes.fromhex(host_id[1:]).decode())
        [(sender, offer)] = candidates([offer], senders)
        writer = sender.connect(offer, _PAIRING)
        try:
            # As workers do, but in two chunks at least.
            chunk_bytes = chunk_bytes_over([name], to_device=reaches_device([offer]))
            chunk_blocks = min(chunk_bytes // LAYOUT.worker_block_bytes, pool.num_blocks // 2)
            yield _Peer(process, writer, pool.num_blocks, chunk_blocks)
        finally:
            writer.close()
    finally:
        process.kill()
        process.communicate()


def _key(attempt: int) -> TransferKey:
    return TransferKey(transfer_id=TransferId("gpu"), attempt=attempt)


def _cells(first: int, count: int) -> CellRange:
    heads, layers = LAYOUT.num_kv_heads, LAYOUT.num_layers
    return CellRange(first_layer=0, num_layers=layers, first_unit=first, num_units=count, first_head=0, num_heads=heads)


class _Receiving:
    def __init__(self, receiver: KVReceiver, pool: _Pool) -> None:
        self._receiver = receiver
        self._pool = pool
        self._attempt = 0

    def answer(self, line: str) -> str:
        """Answer a line as the module describes. Raises ValueError for an unknown command."""
        verb, *numbers = line.split()
        if verb == "grant":
            return self._grant().hex()
        if verb == "verify":
            first, count, checksum = map(int, numbers)
            return str(int(not self._receiver.verify(_key(self._attempt), _cells(first, count), checksum)))
        if verb == "compare":
            return str(self._num_wrong())
        raise ValueError(f"{verb!r} is not a command")

    def _grant(self) -> bytes:
        # The previous round has been verified, so nothing of it is still moving.
        self._receiver.revoke(_key(self._attempt))
        self._attempt += 1
        self._pool.memory.zero_()
        _await(self._pool.memory)
        cells = _PAIRING.at_destination(0, _scattered(self._pool.num_blocks), self._pool.num_blocks)
        return self._receiver.open_grant(_key(self._attempt), Landing(self._pool.region, cells, _PAIRING))

    def _num_wrong(self) -> int:
        """Count the bytes that differ from the sender's."""
        memory, num_blocks = self._pool.memory, self._pool.num_blocks
        shape = (LAYOUT.num_layers, num_blocks, -1)
        expected = _pattern(memory.device, num_blocks).view(shape)
        places = torch.tensor(_scattered(num_blocks), device=memory.device)
        return int((memory.view(shape)[:, places] != expected).sum().item())


def receive(name: str, where: str, num_blocks: int) -> None:
    """Run the receiving process until standard input ends."""
    pool = _Pool.blank(where, num_blocks)
    [receiver] = open_receivers(pool.region, choice=name, isolated_network=True)
    receiver.listen_quiet(lambda _key: None)
    receiving = _Receiving(receiver, pool)
    offer = receiver.offer()
    print(offer.advert.hex(), f"-{offer.host_id.encode().hex()}", flush=True)
    for line in sys.stdin:
        print(receiving.answer(line), flush=True)
    receiver.close()


if __name__ == "__main__":
    receive(sys.argv[1], sys.argv[2], int(sys.argv[3]))
