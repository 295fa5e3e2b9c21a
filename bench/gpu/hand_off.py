"""KV hand-off between GPU pools of two processes: every byte compared, and rates, over cuda_ipc and tcp on one GPU, and
over torch_dist (NCCL) between two where there are two.

`python -m bench.gpu.hand_off TRANSPORT GPU` is the receiving process: it says its offer and a grant for all its blocks,
then obeys `verify FIRST COUNT CHECKSUM` and `compare`, answering with a number of chunks or bytes that are wrong.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

from bench.errors import CannotMeasure
from bench.gpu.stage import Findings, Note, Stage
from bench.report import figure
from kv_transfer.cell_range import CellRange
from kv_transfer.landing import Landing
from kv_transfer.messages import TransferKey, TransportOffer
from kv_transfer.pairing import Pairing
from kv_transfer.region import KVRegion
from kv_transfer.torch_pool import TorchPool
from kv_transfer.transport import PeerWriter, WriteOrder
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from tandem.ids import BlockId, TransferId
from tandem.kv_layout import KVLayout

LAYOUT = KVLayout(model_fingerprint="x", dtype="bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16)
"""Of an 8B model: a block is 2 MiB in all layers."""
NUM_BLOCKS = 512
CHUNK_BLOCKS = 4
ROUNDS = 3
_SEED = 7
_KEY = TransferKey(transfer_id=TransferId("gpu"), attempt=1)
_PAIRING = Pairing.of(LAYOUT, LAYOUT, wire_dtype=LAYOUT.dtype)


def cuda_ipc(stage: Stage) -> Findings:
    """Bytes and rates of the transports that reach GPU memory. Raises CannotMeasure without a GPU."""
    if stage.device != "cuda":
        raise CannotMeasure(f"hand-off by CUDA IPC on {stage.device}: it needs a GPU")
    pool = TorchPool(_pattern(stage.place), LAYOUT)
    yield figure("copy on the device", _copy_rate(pool.memory), "GB/s")
    num_gpus = torch.cuda.device_count()
    for name, gpu in (("cuda_ipc", 0), ("tcp", 0), ("torch_dist", 1))[: 2 if num_gpus < 2 else 3]:
        with _peer(name, pool, gpu) as peer:
            peer.round()
            rates = []
            for _ in range(ROUNDS):
                rates.append(peer.round())
            yield figure(f"{name}: wrong chunks", peer.bad_chunks, "chunks", at_most=0)
            yield figure(f"{name}: wrong bytes", peer.ask("compare"), "bytes", at_most=0)
            yield figure(f"{name}: GPU pool to GPU pool", max(rates), "GB/s")
    yield Note(
        name="hand-off",
        text=f"two processes, {num_gpus} GPUs; NCCL needs two; checksums are computed, verification is not timed",
    )


def _pattern(place: torch.device) -> Tensor:
    """A pool of random bytes, the same in every process that asks on the same kind of device."""
    generator = torch.Generator(place).manual_seed(_SEED)
    size = NUM_BLOCKS * LAYOUT.worker_block_bytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=place, generator=generator)


def _scattered() -> tuple[BlockId, ...]:
    """Where the receiver has the sender's blocks, in their order."""
    blocks = [BlockId(block) for block in range(NUM_BLOCKS)]
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


class _Peer:
    def __init__(self, process: "subprocess.Popen[str]", writer: PeerWriter, grant: bytes) -> None:
        self.bad_chunks = 0
        self._process = process
        self._writer = writer
        self._grant = grant

    def round(self) -> float:
        """Write the whole pool, then have every chunk verified; GB/s of the writing."""
        started_s = time.perf_counter()
        chunks = [(first, self._writer.write(self._order(first))) for first in range(0, NUM_BLOCKS, CHUNK_BLOCKS)]
        results = [(first, future.result(30.0)) for first, future in chunks]
        seconds = time.perf_counter() - started_s
        for first, result in results:
            self.bad_chunks += self.ask(f"verify {first} {CHUNK_BLOCKS} {result.checksum}")
        return sum(result.num_bytes for _, result in results) / seconds / 1e9

    def ask(self, line: str) -> int:
        """A number from the other process. Raises CannotMeasure when it has ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise CannotMeasure("the receiving process has no pipes")
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise CannotMeasure("the receiving process has ended")
        return int(answer)

    def _order(self, first: int) -> WriteOrder:
        blocks = tuple(BlockId(block) for block in range(NUM_BLOCKS))
        source = _PAIRING.at_source(0, 0, blocks, NUM_BLOCKS)
        return WriteOrder(key=_KEY, grant=self._grant, cells=_cells(first, CHUNK_BLOCKS), source=source)


@contextmanager
def _peer(name: str, pool: TorchPool, gpu: int) -> Iterator[_Peer]:
    command = [sys.executable, "-m", "bench.gpu.hand_off", name, str(gpu)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        words = process.stdout.readline().split() if process.stdout is not None else []
        if len(words) != 3:
            raise CannotMeasure(f"{name}: the receiving process did not begin")
        advert, host_id, grant = words
        senders = open_senders(KVRegion.on_device(pool), choice=name, isolated_network=True)
        offer = TransportOffer(name=name, advert=bytes.fromhex(advert), host_id=bytes.fromhex(host_id[1:]).decode())
        [(sender, offer)] = candidates([offer], senders)
        writer = sender.connect(offer, _PAIRING)
        try:
            yield _Peer(process, writer, bytes.fromhex(grant))
        finally:
            writer.close()
    finally:
        process.kill()
        process.communicate()


def _cells(first: int, count: int) -> CellRange:
    heads, layers = LAYOUT.num_kv_heads, LAYOUT.num_layers
    return CellRange(first_layer=0, num_layers=layers, first_unit=first, num_units=count, first_head=0, num_heads=heads)


def receive(name: str, place: torch.device) -> None:
    """The other process, until its standard input ends."""
    memory = torch.zeros(NUM_BLOCKS * LAYOUT.worker_block_bytes, dtype=torch.uint8, device=place)
    region = KVRegion.on_device(TorchPool(memory, LAYOUT))
    [receiver] = open_receivers(region, choice=name, isolated_network=True)
    receiver.listen_quiet(lambda _key: None)
    landing = Landing(region, _PAIRING.at_destination(0, _scattered(), NUM_BLOCKS), _PAIRING)
    offer, grant = receiver.offer(), receiver.open_grant(_KEY, landing)
    print(offer.advert.hex(), f"-{offer.host_id.encode().hex()}", grant.hex(), flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        if verb == "verify":
            first, count, checksum = map(int, numbers)
            print(int(not receiver.verify(_KEY, _cells(first, count), checksum)), flush=True)
        else:
            print(_num_wrong(memory), flush=True)
    receiver.close()


def _num_wrong(memory: Tensor) -> int:
    """Bytes that are not the sender's."""
    shape = (LAYOUT.num_layers, NUM_BLOCKS, -1)
    expected = _pattern(memory.device).view(shape)
    places = torch.tensor(_scattered(), device=memory.device)
    return int((memory.view(shape)[:, places] != expected).sum().item())


if __name__ == "__main__":
    receive(sys.argv[1], torch.device("cuda", int(sys.argv[2])))
