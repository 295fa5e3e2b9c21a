"""`nixl` with a conversion, over a fake agent that moves bytes as late as it may."""

import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.runs import RunPair
from kv_transfer.memory import departure
from kv_transfer.memory.checksum import RunningCrc32, RunningSum32
from kv_transfer.memory.departure import Departure
from kv_transfer.memory.region import KVRegion
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.nixl import sender as nixl_sender
from kv_transfer.transports.nixl.agent import AgentMemory
from kv_transfer.transports.nixl.receiver import pack_pool
from kv_transfer.transports.nixl.sender import NixlWriter
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.wire import ClaimKind
from tandem.errors import TransferError
from tests.support.kv_transfer.device_fakes import on_device
from tests.unit.kv_transfer.transports.test_conversions import KEY, POOL_BLOCKS, SOURCES, TARGETS, cells, layout, region

WAIT_S = 20.0
TOKEN = bytes(range(16))


class LateAgent:
    """Reads its memory only when it is waited for, as a network card may after a write was posted."""

    target = memoryview(b"")

    def __init__(self, _name: str, memory: AgentMemory, *, loopback: bool) -> None:
        self._memory = memoryview(memory.owner)
        self._posted: deque[Sequence[RunPair]] = deque()
        self.num_posted = 0
        self.closed = False
        self.on_wait = lambda: None

    def add_remote(self, *_: object) -> None:
        pass

    def post(self, copies: Sequence[RunPair], _grain: int) -> int:
        self._posted.append(list(copies))
        self.num_posted += 1
        return self.num_posted

    def wait(self, _request: int, _pause: threading.Event) -> bool:
        self.on_wait()
        for here, there, size in self._posted.popleft():
            self.target[there : there + size] = self._memory[here : here + size]
        return True

    def close(self, _requests: Sequence[int] = ()) -> None:
        self.closed = True


class Ends:
    def __init__(
        self, here: str, wire: str, there: str, monkeypatch: pytest.MonkeyPatch, *, to_device: bool = False
    ) -> None:
        self.pairing = Pairing.from_layouts(layout(here), layout(there), wire_dtype=wire)
        self.source, self.target = region(self.pairing.source, 1), region(self.pairing.destination, 0)
        agents: list[LateAgent] = []

        def make(*args: Any, **kwargs: Any) -> LateAgent:
            agents.append(LateAgent(*args, **kwargs))
            agents[-1].target = self.target.buffer
            return agents[-1]

        monkeypatch.setattr(nixl_sender, "NixlAgent", make)
        self._to_device = to_device
        ours, self.theirs = socket.socketpair()
        one_sided_wire.send_blob(self.theirs, self._described() + b"metadata")
        self._granting = threading.Thread(target=self._grant, daemon=True)
        self._granting.start()
        self.writer = NixlWriter(self.source, ours, self.pairing, loopback=True, to_device=to_device)
        (self.agent,) = agents

    def _described(self) -> bytes:
        return pack_pool(AgentMemory.of_region(self.target), on_device=self._to_device)

    def _grant(self) -> None:
        with suppress(OSError, TransferError):
            while (message := one_sided_wire.receive(self.theirs)) is not None:
                if message[0] is ClaimKind.CLAIM:
                    one_sided_wire.send(self.theirs, ClaimKind.CLAIMED, message[1])

    def order(self) -> WriteOrder:
        grant = one_sided_wire.pack_grant(TOKEN, TARGETS)
        read = self.pairing.at_source(0, 0, SOURCES, POOL_BLOCKS)
        return WriteOrder(key=KEY, grant=grant, cells=cells(), source=read)

    def expected(self) -> tuple[bytes, int]:
        """The target's bytes, and the checksum of what travels."""
        other = KVRegion.from_buffer(memoryview(bytearray(self.target.buffer.nbytes)), self.pairing.destination)
        payload = Departure(self.source, self.pairing).convert(self.order().source, cells())
        placed = self.pairing.at_destination(0, TARGETS, POOL_BLOCKS)
        at = 0
        for there, size in placed.writes(cells()):
            other.buffer[there : there + size] = payload[at : at + size].data
            at += size
        running = RunningSum32() if self._to_device else RunningCrc32()
        running.add(payload.data)
        return bytes(other.buffer), running.value

    def close(self) -> None:
        self.theirs.close()
        self.writer.close()
        self._granting.join(WAIT_S)


@pytest.fixture(
    params=[("bfloat16", "int8", "int8"), ("float32", "int8", "int8"), ("bfloat16", "fp8_e4m3", "fp8_e4m3")]
)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setattr(departure, "MAX_CONVERTED_BYTES", 1000)  # several parts in a chunk, cut within a layer
    monkeypatch.setattr(nixl_sender, "BURST_BYTES", 1000)
    monkeypatch.setattr(nixl_sender, "BOUNCE_BYTES", 8000)  # the ring goes round many times
    made = Ends(*request.param, monkeypatch)
    yield made
    made.close()


def test_nixl_conversion_delayed_write_lands_converted(ends: Ends) -> None:
    write_result = ends.writer.write(ends.order()).result(WAIT_S)
    expected, checksum = ends.expected()
    assert bytes(ends.target.buffer) == expected
    assert write_result.checksum == checksum
    assert write_result.num_bytes > 2 * 8000
    assert ends.agent.num_posted > 16


@pytest.mark.parametrize("target_at", ["host", "device"])
@pytest.mark.parametrize("source_at", ["host", "device"])
def test_nixl_conversion_is_summed_as_the_receiver_does(
    monkeypatch: pytest.MonkeyPatch, source_at: str, target_at: str
) -> None:
    """Wherever the pools are, converted payload goes by way of host memory."""
    really = nixl_sender.NixlWriter.__init__

    def from_there(writer: NixlWriter, source: KVRegion, *args: Any, **kwargs: Any) -> None:
        really(writer, on_device(source) if source_at == "device" else source, *args, **kwargs)

    monkeypatch.setattr(NixlWriter, "__init__", from_there)
    ends = Ends("bfloat16", "int8", "int8", monkeypatch, to_device=target_at == "device")
    try:
        result = ends.writer.write(ends.order()).result(WAIT_S)
        assert (bytes(ends.target.buffer), result.checksum) == ends.expected()
    finally:
        ends.close()


def test_nixl_conversion_releases_lock_between_parts(ends: Ends) -> None:
    """A cancel waits for one part at most, and the later ones are not converted."""
    seen: list[bool] = []

    def cancel() -> None:
        if not seen:
            seen.append(ends.writer.cancel(KEY))  # would wait for ever if the queue's lock were held

    ends.agent.on_wait = cancel
    with pytest.raises(TransferError, match="cancelled"):
        ends.writer.write(ends.order()).result(WAIT_S)
    assert seen == [False], "the card was still reading"
    assert ends.agent.num_posted < 8
    assert not ends.agent.closed, "a cancel ends no connection"
    ends.agent.on_wait = lambda: None


def test_nixl_missing_cells_are_refused_and_connection_stays_open(ends: Ends) -> None:
    order = ends.order()
    wrong = WriteOrder(key=KEY, grant=order.grant, cells=cells(num_units=99), source=order.source)
    with pytest.raises(TransferError):
        ends.writer.write(wrong).result(WAIT_S)
    assert not ends.writer.closed
    assert not ends.agent.num_posted
