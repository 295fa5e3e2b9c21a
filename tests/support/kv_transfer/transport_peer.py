"""A second process for transport tests, which obeys lines on stdin.

`... transport_peer NAME ADVERT_HEX HOST_ID STREAMS [CERT KEY CA]` fills its own pool with a pattern and obeys
`write GRANT_HEX FIRST COUNT`, answering the checksum. `... transport_peer NAME NUM_BLOCKS` receives: it says its offer
and a grant for all its blocks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.shared_memory import SharedPool
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.errors import TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
PAIRING = Pairing.from_layouts(LAYOUT, LAYOUT, wire_dtype=LAYOUT.dtype)
NUM_BLOCKS = 24


def make_region(seed: int, num_blocks: int = NUM_BLOCKS) -> KVRegion:
    """A pool whose bytes depend on `seed`; 0 leaves it zeroed."""
    pool = SharedPool(num_blocks * LAYOUT.block_bytes)
    if seed:
        pool.buffer[:] = bytes((i * 31 + seed * 7 + i // 251) % 256 for i in range(pool.size_bytes))
    return KVRegion.from_buffer(pool.buffer, LAYOUT, fd=pool.fd)


def cell_range(first_unit: int, num_units: int, first_layer: int = 0, num_layers: int = LAYOUT.num_layers) -> CellRange:
    """Cells over all heads."""
    return CellRange(
        first_layer=first_layer,
        num_layers=num_layers,
        first_unit=first_unit,
        num_units=num_units,
        first_head=0,
        num_heads=LAYOUT.num_kv_heads,
    )


def order(
    key: TransferKey, grant: bytes, cells: CellRange, sources: list[int], *, pool_blocks: int = NUM_BLOCKS
) -> WriteOrder:
    """A write of `sources`, one for each unit of the cells."""
    source = PAIRING.at_source(0, cells.first_unit, blocks_of(sources), pool_blocks)
    return WriteOrder(key=key, grant=grant, cells=cells, source=source)


def landing(region: KVRegion, *blocks: int) -> Landing:
    """A reservation of these blocks."""
    return Landing(region, PAIRING.at_destination(0, blocks_of(blocks), region.num_blocks), PAIRING)


def block_views(region: KVRegion, blocks: Sequence[int]) -> list[memoryview]:
    """All bytes of these blocks, in the order of the wire."""
    return landing(region, *blocks).room(cell_range(0, len(blocks)))


def blocks_of(numbers: Sequence[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module's docstring."""
    if len(sys.argv) == 3:
        _receive(sys.argv[1], int(sys.argv[2]))
    else:
        _send(*sys.argv[1:5], *map(Path, sys.argv[5:]))


def _receive(name: str, num_blocks: int) -> None:
    region = make_region(0, num_blocks)
    [receiver] = open_receivers(region, choice=name)
    receiver.listen_quiet(lambda _key: None)
    offer = receiver.offer()
    key = TransferKey(transfer_id=TransferId("t"), attempt=1)
    grant = receiver.open_grant(key, landing(region, *range(num_blocks)))
    _say(f"{offer.advert.hex()} {offer.host_id or '-'} {grant.hex()}")
    sys.stdin.read()
    receiver.close()


def _send(name: str, advert: str, host_id: str, streams: str, *files: Path) -> None:
    tls = None
    if files:
        cert, key_file, ca = files
        tls = TlsIdentity(TlsFiles(cert=cert, key=key_file, ca=ca, setting="transfer.tls"))
    tcp = TcpSettings(streams=int(streams), tls=tls)
    region = make_region(seed=5)
    offer = TransportOffer(name=name, advert=bytes.fromhex(advert), host_id=host_id)
    [(sender, offer)] = candidates([offer], open_senders(region, choice=name, tcp=tcp))
    writer = sender.connect(offer, PAIRING)
    key = TransferKey(transfer_id=TransferId("t"), attempt=1)
    _say("ready")
    for line in sys.stdin:
        _verb, grant, first, count = line.split()
        sources = list(range(int(first), int(first) + int(count)))
        chunk = order(key, bytes.fromhex(grant), cell_range(int(first), int(count)), sources)
        try:
            result = writer.write(chunk).result(10)
            _say(f"done {result.checksum}")
        except TransferError as error:
            _say(f"failed {error}")
    writer.close()


if __name__ == "__main__":
    main()
