"""Skipped payload in TLS, whose end may already have been decrypted."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.transports.grants import GrantTable
from kv_transfer.transports.tcp.inbound import _SCRATCH_BYTES, Inbound, Peer
from kv_transfer.transports.tcp.tls import TlsChannel, TlsIdentity
from tandem.errors import TransferError
from tests.support.certificates import Authority

STALL_S = 5.0
RECORD = 16 << 10


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[tuple[TlsChannel, TlsChannel]]:
    """(sending end, receiving end), handshake done."""
    identity = TlsIdentity(Authority().issue(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    ends = identity.dial(dialled), identity.serve(accepted)
    shaking = threading.Thread(target=ends[0].do_handshake, args=(time.monotonic() + STALL_S,))
    shaking.start()
    ends[1].do_handshake(time.monotonic() + STALL_S)
    shaking.join()
    yield ends
    for end in ends:
        end.close()


def send(channel: TlsChannel, num_bytes: int) -> None:
    data = memoryview(bytes(num_bytes))
    while data:
        data = data[channel.send([data]) :]
        while not channel.flush():
            channel.wait_writable(STALL_S)


@pytest.mark.parametrize("first", [500, RECORD - 1, 1])
def test_tls_skip_does_not_wait_for_rest_of_record(channels: tuple[TlsChannel, TlsChannel], first: int) -> None:
    """The scratch buffer fills up inside the last record: poll would not report the rest."""
    sending, receiving = channels
    inbound = Inbound(receiving, Peer(), GrantTable(), seed=0, mover=None, stall_s=STALL_S)
    sender = threading.Thread(target=lambda: (send(sending, first), send(sending, _SCRATCH_BYTES)))
    sender.start()
    inbound._skip(first + _SCRATCH_BYTES)
    sender.join()
    assert receiving.receive([memoryview(bytearray(1))]) is None, "all of it, and nothing more"


class Records:
    """A channel with so many bytes decrypted, the rest to come; fails if it is waited for before they are taken."""

    def __init__(self, *arrivals: int) -> None:
        self._arrivals = list(arrivals)
        self._ready = 0
        self.num_waits = 0

    def receive(self, burst: list[memoryview]) -> int | None:
        if not self._ready:
            return None
        count = min(len(burst[0]), self._ready)
        self._ready -= count
        return count

    def wait_readable(self, _timeout_s: float | None) -> None:
        if self._ready or not self._arrivals:
            raise TransferError("nothing comes in time")
        self.num_waits += 1
        self._ready = self._arrivals.pop(0)


def test_tls_skip_waits_only_for_missing_bytes() -> None:
    channel = Records(_SCRATCH_BYTES + 10, 90)
    pretended: Any = channel
    Inbound(pretended, Peer(), GrantTable(), seed=0, mover=None, stall_s=STALL_S)._skip(_SCRATCH_BYTES + 100)
    assert channel.num_waits == 2
    with pytest.raises(TransferError, match="in time"):
        Inbound(pretended, Peer(), GrantTable(), seed=0, mover=None, stall_s=STALL_S)._skip(1)
