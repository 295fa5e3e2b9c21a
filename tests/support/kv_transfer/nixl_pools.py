"""Two processes with pools in host memory, on the CPU as a device, or on GPUs, and `nixl` between them.

`... nixl_pools PLACE SEED` is the receiving process; it obeys the lines that NixlPeer writes. Used by tests with and
without a GPU, so nothing here needs pytest.
"""

import hashlib
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import Bytes, KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.interface import WriteOrder, WriteResult
from kv_transfer.transports.nixl.receiver import NAME, NixlReceiver
from kv_transfer.transports.nixl.sender import NixlSender
from tandem.errors import TransferError
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout

WAIT_S = 30.0
HOST, CPU = "host", "cpu"
"""A pool in host memory, and a TorchPool there; other places are torch's, such as "cuda:0"."""
_LATE_S = 0.3
"""What was still on its way would land within this time."""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Random layouts of both sides, blocks, and cells to be sent, equal in both processes for equal seeds."""

    pairing: Pairing
    source_blocks: int
    target_blocks: int
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]
    cells: CellRange

    @classmethod
    def from_seed(cls, seed: int) -> "Pools":
        rng = random.Random(seed)
        heads, layers = rng.choice((1, 2, 4, 8)), rng.choice((2, 6, 12))
        sizes = rng.choice(((16, 16), (16, 32), (32, 16)))
        here, there = (
            KVLayout(
                model_fingerprint="m",
                dtype="bfloat16",
                num_layers=layers,
                num_kv_heads=heads,
                head_dim=64,
                block_size=size,
                tp_size=rng.choice((1, 2)),
            )
            for size in sizes
        )
        pairing = Pairing.from_layouts(here, there, wire_dtype=there.dtype)
        num_tokens = rng.randrange(1, 20) * 32
        source_blocks, target_blocks = (num_tokens // size + rng.randrange(1, 9) for size in sizes)
        return cls(
            pairing=pairing,
            source_blocks=source_blocks,
            target_blocks=target_blocks,
            sources=_some(rng, source_blocks, num_tokens // sizes[0]),
            targets=_some(rng, target_blocks, num_tokens // sizes[1]),
            cells=CellRange(
                first_layer=0,
                num_layers=layers,
                first_unit=0,
                num_units=num_tokens // pairing.mapping.unit_tokens,
                first_head=0,
                num_heads=heads,
            ),
        )

    def source_bytes(self) -> Bytes:
        size = self.source_blocks * self.pairing.source.region_block_bytes
        return np.random.default_rng(self.source_blocks).integers(0, 256, size, np.uint8)

    def expected(self) -> Bytes:
        """All bytes of the target, which was zeroed, after the cells have landed."""
        read = self.pairing.at_source(0, 0, self.sources, self.source_blocks)
        written = self.pairing.at_destination(0, self.targets, self.target_blocks)
        runs = read.reads(self.cells)
        payload = np.empty(runs.num_bytes, np.uint8)
        numpy_copy.gather(runs, self.source_bytes(), payload)
        target = np.zeros(self.target_blocks * self.pairing.destination.region_block_bytes, np.uint8)
        numpy_copy.scatter(written.writes(self.cells), payload, target)
        numpy_copy.copy(written.fan_out(self.cells), target, target)
        return target


def _some(rng: random.Random, num_blocks: int, count: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in rng.sample(range(num_blocks), count))


def place(content: Bytes, layout: KVLayout, where: str) -> tuple[KVRegion, torch.Tensor]:
    """A pool with these bytes, and its memory as a tensor."""
    memory = torch.from_numpy(content)
    if where == HOST:
        return KVRegion.from_buffer(memoryview(content), layout), memory
    memory = memory.to(where)
    if memory.is_cuda:
        torch.cuda.synchronize()
    return KVRegion.on_device(TorchPool(memory, layout)), memory


def key(attempt: int) -> TransferKey:
    return TransferKey(transfer_id=TransferId("t"), attempt=attempt)


class NixlPeer:
    """The receiving process, and a writer of this process's pool that is connected to it."""

    def __init__(self, seed: int, here: str, there: str) -> None:
        self.pools = pools = Pools.from_seed(seed)
        command = [sys.executable, "-m", "tests.support.kv_transfer.nixl_pools", there, str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.region, self.memory = place(pools.source_bytes(), pools.pairing.source, here)
        try:
            offer = TransportOffer(name=NAME, advert=bytes.fromhex(self._answer()), host_id="")
            self.writer = NixlSender(self.region).connect(offer, pools.pairing)
        except BaseException:
            self.process.kill()
            raise

    def ask(self, line: str) -> str:
        """Have the other process do something, and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the receiving process has ended: {self.process.wait(WAIT_S)}")
        return line.strip()

    def write(self, attempt: int, grant: str) -> "Future[WriteResult]":
        pools = self.pools
        source = pools.pairing.at_source(0, 0, pools.sources, pools.source_blocks)
        order = WriteOrder(key=key(attempt), grant=bytes.fromhex(grant), cells=pools.cells, source=source)
        return self.writer.write(order)

    def close(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.communicate()


def check_bytes(peer: NixlPeer) -> None:
    """Every byte lands where it should and no other changes; a damaged chunk is noticed, and can be sent again."""
    grant = peer.ask("grant 1")
    result = peer.write(1, grant).result(WAIT_S)
    assert peer.ask(f"damage {result.checksum}") == "damaged"
    result = peer.write(1, grant).result(WAIT_S)
    assert peer.ask(f"verify 1 {result.checksum}") == "intact"
    assert peer.ask("bytes") == hashlib.sha256(peer.pools.expected().tobytes()).hexdigest()
    assert peer.ask("revoke 1") == "quiet"


def check_revocation(peer: NixlPeer, first_attempt: int = 2, num_attempts: int = 5) -> None:
    """Nothing lands once a revocation is proven."""
    for attempt in range(first_attempt, first_attempt + num_attempts):
        grant = peer.ask(f"grant {attempt}")
        futures = [peer.write(attempt, grant) for _ in range(8)]
        futures[attempt % 3].result(WAIT_S)
        assert peer.ask(f"revoke {attempt}") == "quiet"
        assert peer.ask("stays blank") == "blank"
        outcomes = [future.exception(WAIT_S) for future in futures]
        assert all(outcome is None or isinstance(outcome, TransferError) for outcome in outcomes)


def check_closed_receiver(peer: NixlPeer) -> None:
    """A receiver that closes ends all writes, and nothing lands afterwards."""
    grant = peer.ask("grant 99")
    futures = [peer.write(99, grant) for _ in range(8)]
    futures[0].result(WAIT_S)
    assert peer.ask("close") == "closed"
    assert peer.ask("stays blank") == "blank"
    for future in futures:
        future.exception(WAIT_S)
    failed = peer.write(99, grant).exception(WAIT_S)
    assert isinstance(failed, TransferError), failed


def check_pair(seed: int, here: str, there: str) -> None:
    """All of it, between a pool at `here` and one at `there`."""
    peer = NixlPeer(seed, here, there)
    try:
        check_bytes(peer)
        check_revocation(peer)
        check_closed_receiver(peer)
    finally:
        peer.close()


class _Receiving:
    def __init__(self, where: str, seed: int) -> None:
        self.pools = pools = Pools.from_seed(seed)
        layout = pools.pairing.destination
        blank = np.zeros(pools.target_blocks * layout.region_block_bytes, np.uint8)
        self.region, self.memory = place(blank, layout, where)
        self.receiver = NixlReceiver(self.region)
        self._quiet = threading.Event()
        self.receiver.listen_quiet(lambda _key: self._quiet.set())

    def answer(self, verb: str, *numbers: str) -> str:
        values: Any = [int(number) for number in numbers if number.isdigit()]
        return {
            "grant": self._grant,
            "damage": self._damage,
            "verify": self._verify,
            "bytes": self._bytes,
            "revoke": self._revoke,
            "stays": self._stays_blank,
            "close": self._close,
        }[verb](*values)

    def _grant(self, attempt: int) -> str:
        pools = self.pools
        cells = pools.pairing.at_destination(0, pools.targets, pools.target_blocks)
        return self.receiver.open_grant(key(attempt), Landing(self.region, cells, pools.pairing)).hex()

    def _verify(self, attempt: int, checksum: int) -> str:
        return "intact" if self.receiver.verify(key(attempt), self.pools.cells, checksum) else "damaged"

    def _damage(self, checksum: int) -> str:
        cells = self.pools.pairing.at_destination(0, self.pools.targets, self.pools.target_blocks)
        offset, length = next(iter(cells.writes(self.pools.cells)))
        self.memory[offset + length // 2] ^= 1
        self._settle()
        return self._verify(1, checksum)

    def _bytes(self) -> str:
        self._settle()
        return hashlib.sha256(self.memory.cpu().numpy().tobytes()).hexdigest()

    def _revoke(self, attempt: int) -> str:
        self._quiet.clear()
        proven = self.receiver.revoke(key(attempt)) or self._quiet.wait(WAIT_S)
        return "quiet" if proven else "not proven"

    def _stays_blank(self) -> str:
        self.memory.zero_()
        self._settle()
        # Nothing tells of bytes that do not come: what UCX or the kernel still had would be here after this long.
        time.sleep(_LATE_S)
        return "written" if bool(self.memory.any()) else "blank"

    def _close(self) -> str:
        self.receiver.close()
        return "closed"

    def _settle(self) -> None:
        if self.memory.is_cuda:
            torch.cuda.synchronize()


def main() -> None:
    """See the module's docstring."""
    receiving = _Receiving(sys.argv[1], int(sys.argv[2]))
    print(receiving.receiver.offer().advert.hex(), flush=True)
    for line in sys.stdin:
        print(receiving.answer(*line.split()), flush=True)


if __name__ == "__main__":
    main()
