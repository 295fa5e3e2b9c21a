"""Cost of a hand-off in Python per block: planned, described and framed on both sides, without moving a byte."""

import ctypes
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.mover import RECIPE, Mover
from kv_transfer.memory.write_stop_lock import BurstLock, WriteStopLock
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.region_copy import RegionCopier
from kv_transfer.transports.tcp import frames as tcp_frames
from tandem.native.build import NativeUnavailable, build
from tandem.native.library import NativeLibrary
from tandem_bench.errors import CannotMeasure
from tandem_bench.transfer.cases import Case
from tandem_bench.transfer.our_ends import landing_of, orders_of, pairing_of, region_of
from tandem_bench.transfer.pools import Pools

_REPEATS = 25


def seconds_per_block(cases: Sequence[Case], pools: Pools) -> Mapping[tuple[str, str], float]:
    """Measure by case and transport; the minimum of some repeats counts, since other activity only adds time."""
    source, target = pools.source.data, pools.target.data
    found: dict[tuple[str, str], float] = {}
    silent, nobody = socket.socketpair()
    with silent, nobody:
        for case in cases:
            message = case.message()
            for transport, describe in (
                ("shm", _over_shm(message, source, target)),
                ("tcp", _over_tcp(message, source, target, silent.fileno())),
            ):
                found[case.name, transport] = min(_timed(describe) for _ in range(_REPEATS)) / len(case.sources)
    return found


def _over_tcp(case: Mapping[str, Any], source: memoryview, target: memoryview, silent: int) -> Callable[[], None]:
    """Return chunks, their orders and headers, and on both sides one call that finds an empty socket."""
    pairing, grant = pairing_of(case), bytes(TOKEN_BYTES)
    here = region_of(case, source, None)
    landing = landing_of(case, pairing, region_of(case, target, None))
    streams, lock = _mover(NativeLibrary).streams, BurstLock()

    def describe() -> None:
        for order in orders_of(case, pairing, grant):
            addresses = CellAddresses(here, order.source, is_source=True)
            # It receives as well, or it would send.
            outgoing = streams.open(addresses, order.cells, silent, lock, is_sending=False)
            header = tcp_frames.unpack_header(tcp_frames.pack_header(_header(order, outgoing.num_bytes)))
            there = landing.addresses(header.cells)
            if there is None:
                raise CannotMeasure("tcp does not plan ahead without compiled code")
            for side in (outgoing, streams.open(there, header.cells, silent, lock, is_sending=False)):
                with lock:
                    side.advance()
            landing.judged(header.cells, intact=False)

    return describe


def _header(order: WriteOrder, num_bytes: int) -> tcp_frames.FrameHeader:
    return tcp_frames.FrameHeader(
        kind=tcp_frames.FrameKind.WRITE, write_id=1, token=order.grant, cells=order.cells, payload_bytes=num_bytes
    )


def _over_shm(case: Mapping[str, Any], source: memoryview, target: memoryview) -> Callable[[], None]:
    """Return chunks, their orders, and on both sides everything up to the calls that move and checksum a chunk."""
    pairing, grant = pairing_of(case), bytes(TOKEN_BYTES)
    there = region_of(case, target, None)
    landing = landing_of(case, pairing, there)
    placed = CellAddresses(there, landing.cells, is_source=False)
    mover, lock = _mover(_Idle), BurstLock()
    copier = RegionCopier(region_of(case, source, None), there, pairing, mover)

    def check() -> None:
        pass

    def describe() -> None:
        for order in orders_of(case, pairing, grant):
            copier.copy(order, landing.cells, WriteStopLock(check, lock), nullcontext)
            mover.checksum(placed, order.cells)

    return describe


def _mover(kind: type[NativeLibrary]) -> Mover:
    try:
        return Mover(kind(build(RECIPE)))
    except NativeUnavailable as unavailable:
        raise CannotMeasure(f"nothing is planned ahead without compiled code: {unavailable}") from None


class _Idle(NativeLibrary):
    """Replaces each function by one of the same signature that does nothing."""

    def bind(self, name: str, signature: str, returns: str = "") -> Any:
        real = super().bind(name, signature, returns)
        return type(real)(("labs", ctypes.CDLL(None))) if signature == "p" else real


def _timed(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
