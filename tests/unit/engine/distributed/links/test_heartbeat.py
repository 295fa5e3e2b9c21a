"""An end that receives nothing gives up its peer; values in the store reach all ranks."""

import queue
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.distributed.links import heartbeat as pulses
from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.heartbeat import HeartbeatServer, Pulse
from engine.distributed.links.lost import RankLost
from engine.distributed.links.rendezvous import RemoteKeys, RendezvousStore

WAIT_S = 20.0
SILENCE_S = 0.2


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    pair = RankChannel(here, "rank 1"), RankChannel(there, "rank 0")
    yield pair
    for channel in pair:
        channel.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "PULSE_S", 0.01)
    monkeypatch.setattr(pulses, "_EXIT_S", 0.0)


def test_heartbeat_silent_rank_is_given_up(ends) -> None:
    losses = queue.SimpleQueue()
    heartbeats = HeartbeatServer(losses.put, silence_s=SILENCE_S)
    heartbeats.serve(ends[0])
    RemoteKeys(ends[1], silence_s=WAIT_S).pulse()
    assert "rank 1 does not answer" in str(losses.get(timeout=WAIT_S))
    heartbeats.close()
    assert losses.empty()


def test_heartbeat_rank_silent_since_start_is_given_up(ends) -> None:
    losses = queue.SimpleQueue()
    heartbeats = HeartbeatServer(losses.put, silence_s=WAIT_S, start_s=SILENCE_S)
    heartbeats.serve(ends[0])
    assert "rank 1 does not answer" in str(losses.get(timeout=WAIT_S))
    heartbeats.close()


def test_heartbeat_silent_leader_is_given_up(ends) -> None:
    ended = queue.SimpleQueue()
    Pulse(ends[1], silence_s=SILENCE_S, end_process=ended.put)
    assert ended.get(timeout=WAIT_S) == 1


def test_heartbeat_live_ends_report_nothing(ends) -> None:
    losses, ended = queue.SimpleQueue(), queue.SimpleQueue()
    requested = threading.Semaphore(0)
    heartbeats = HeartbeatServer(losses.put)
    answer = heartbeats.keys.answer
    heartbeats.keys.answer = lambda question: (requested.release(), answer(question))[1]
    heartbeats.serve(ends[0])
    Pulse(ends[1], end_process=ended.put)
    for _ in range(5):
        assert requested.acquire(timeout=WAIT_S)
    assert losses.empty()
    assert ended.empty()
    heartbeats.close()
    assert ended.get(timeout=WAIT_S) == 1, "an end that is wanted ends the others"
    assert losses.empty(), "an orderly end is not reported"


@pytest.mark.parametrize("question", [b'{"op": "format the disk"}', b"{", b"[]", b'{"op": "set", "key": 1}'])
def test_heartbeat_malformed_request_is_rank_lost(ends, question: bytes) -> None:
    losses = queue.SimpleQueue()
    heartbeats = HeartbeatServer(losses.put)
    heartbeats.serve(ends[0])
    ends[1].send(ChannelKind.ASK, question)
    assert re.search("malformed (heartbeat|rendezvous request)", str(losses.get(timeout=WAIT_S)))
    heartbeats.close()


def test_heartbeat_store_value_is_visible_to_other_ranks(ends) -> None:
    heartbeats = HeartbeatServer(pytest.fail)
    heartbeats.serve(ends[0])
    keys = RemoteKeys(ends[1], silence_s=WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(keys.get, "address", WAIT_S)
        heartbeats.keys.set("address", b"\x00\xff")
        assert waiting.result(timeout=WAIT_S) == b"\x00\xff"
        keys.set("mine", b"1")
        assert heartbeats.keys.get("mine", 0.0) == b"1"
    assert [keys.add("count", 2), heartbeats.keys.add("count", 1)] == [2, 3]
    assert (keys.has("count"), keys.has("nothing")) == (True, False)
    assert keys.get("nothing", 0.01) is None
    assert (keys.count(), keys.delete("mine"), keys.delete("mine"), heartbeats.keys.count()) == (3, True, False, 2)
    heartbeats.hang_up()


def test_heartbeat_store_closed_releases_waiters() -> None:
    store = RendezvousStore()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "never", WAIT_S)
        store.close()
        assert waiting.result(timeout=WAIT_S) is None


def test_heartbeat_works_without_descriptors(ends) -> None:
    here, there = socket.socketpair()
    one, other = (RankChannel(end, "peer", carries_descriptors=False, most_bytes=100) for end in (here, there))
    one.send(ChannelKind.STEP, b"abc")
    assert bytes(other.expect(ChannelKind.STEP)[0]) == b"abc"
    one.send(ChannelKind.STEP, bytes(101))
    with pytest.raises(RankLost, match="announces 101 bytes"):
        other.receive()
    one.close()
    other.close()
