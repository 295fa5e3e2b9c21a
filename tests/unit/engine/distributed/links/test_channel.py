"""Messages arrive whole and in order, with their descriptors; end, silence and malformed data are distinguished."""

import os
import socket
import struct
import threading

import pytest

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.lost import RankLost
from tandem.errors import ConfigError


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        yield RankChannel(near, "rank 1"), RankChannel(far, "rank 0"), far


def test_channel_messages_of_any_size_arrive_in_order(ends) -> None:
    near, far, _ = ends
    payloads = [b"", b"x", bytes(range(256)) * 8000, b"end"]
    writer = threading.Thread(target=lambda: [near.send(ChannelKind.STEP, payload) for payload in payloads])
    writer.start()
    for payload in payloads:
        kind, got, fd = far.receive()
        assert (kind, fd) == (ChannelKind.STEP, None)
        assert got == payload
    writer.join()
    near.close()
    assert far.receive() is None


def test_channel_descriptor_arrives_with_its_message(ends) -> None:
    near, far, _ = ends
    read, write = os.pipe()
    near.send(ChannelKind.DRY_RUN, b"before")
    near.send(ChannelKind.POOL, bytes(100_000), fd=write)
    os.close(write)
    assert far.expect(ChannelKind.DRY_RUN)[1] is None
    payload, fd = far.expect(ChannelKind.POOL)
    assert len(payload) == 100_000
    os.write(fd, b"same")
    assert os.read(read, 9) == b"same"
    os.close(fd)
    os.close(read)


def test_channel_refusal_is_config_error(ends) -> None:
    near, far, _ = ends
    near.send(ChannelKind.REFUSED, b"no such tensor")
    with pytest.raises(ConfigError, match="rank 0: no such tensor"):
        far.expect(ChannelKind.LOADED)


def test_channel_unexpected_message_or_end_is_rank_lost(ends) -> None:
    near, far, _ = ends
    near.send(ChannelKind.READY)
    with pytest.raises(RankLost, match="rank 0 sent READY, not LOADED"):
        far.expect(ChannelKind.LOADED)
    near.close()
    with pytest.raises(RankLost, match="rank 0 has ended"):
        far.expect(ChannelKind.LOADED)


def test_channel_truncated_message_is_an_end(ends) -> None:
    near, _, raw = ends
    raw.sendall(struct.pack("<BI", ChannelKind.STEP, 100) + b"half")
    raw.shutdown(socket.SHUT_WR)
    assert near.receive() is None


@pytest.mark.parametrize("frame", [struct.pack("<BI", 200, 0), struct.pack("<BI", ChannelKind.STEP, 2**32 - 1)])
def test_channel_malformed_frame_is_rank_lost(ends, frame) -> None:
    near, _, raw = ends
    raw.sendall(frame)
    with pytest.raises(RankLost, match="rank 1"):
        near.receive()


def test_channel_silent_peer_times_out(ends) -> None:
    near, _, _ = ends
    near.set_timeout(0.01)
    with pytest.raises(RankLost, match="rank 1 does not answer"):
        near.receive()
    with pytest.raises(RankLost, match="rank 1 does not accept messages"):
        near.send(ChannelKind.STEP, bytes(1 << 22))
