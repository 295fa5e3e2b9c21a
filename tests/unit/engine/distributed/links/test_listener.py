"""Only ranks of other nodes may join: by TLS, by the secret and by their stated identity."""

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from engine.distributed.links import joining
from engine.distributed.links import listener as listener_module
from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.handshake import JoiningRank, Purpose, temporary_refusal
from engine.distributed.links.heartbeat import HeartbeatServer
from engine.distributed.links.joining import RankLink, connect_to_rank_0
from engine.distributed.links.listener import NodeListener
from engine.distributed.links.lost import RankLost
from engine.distributed.links.node_group import NodeGroup
from tandem.errors import ConfigError
from tandem.rpc.mutual_tls import MutualTls
from tests.support.certificates import Authority
from tests.support.node_processes import OTHER_HOST, group

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank that was rejected try again at once."""
    monkeypatch.setattr(joining, "_AGAIN_S", 0.01)


@pytest.fixture
def lost() -> list[RankLost]:
    return []


@pytest.fixture
def heartbeats(lost: list[RankLost]) -> Iterator[HeartbeatServer]:
    made = HeartbeatServer(lost.append)
    yield made
    made.close()


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def given(authority: Authority, tmp_path: Path) -> NodeGroup:
    return group(size=4, num_nodes=2, tls=authority.issue(tmp_path))


@pytest.fixture
def node_listener(given: NodeGroup, heartbeats: HeartbeatServer) -> Iterator[NodeListener]:
    made = NodeListener(given, heartbeats.serve)
    yield made
    made.close()


@pytest.fixture
def rejected() -> Iterator[threading.Semaphore]:
    """Released once for each connection that a listener rejects."""
    logged = threading.Semaphore(0)

    class RefusalHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("rejected "):
                logged.release()

    watcher = RefusalHandler()
    logging.getLogger("engine.distributed.links.listener").addHandler(watcher)
    yield logged
    logging.getLogger("engine.distributed.links.listener").removeHandler(watcher)


class RemoteRanks:
    """Joining ranks, and both ends of their connections, which are closed in the end."""

    def __init__(self, given: NodeGroup) -> None:
        self.given = given
        self.channels: list[RankChannel] = []

    def come(self, *ranks: int) -> list[RankLink]:
        with ThreadPoolExecutor(len(ranks)) as threads:
            links = list(threads.map(lambda rank: connect_to_rank_0(self.given, rank, OTHER_HOST), ranks))
        for link in links:
            self.channels += [link.steps, link.pulse, link.region]
        return links

    def connect(self, rank: int, purpose: Purpose, token: str = "") -> str:
        """Open one connection and return the token that the listener gives."""
        channel, given, _ = joining._connect(self.given, rank, None, self.given.open_tls(), purpose, token)
        self.channels.append(channel)
        return given

    def gathered(self, node_listener: NodeListener) -> dict[int, RankChannel]:
        """The ranks' connections for steps, and in `regions` those for KV."""
        found = node_listener.gather()
        self.channels += [end for joined in found.values() for end in (joined.steps, joined.region)]
        self.regions = {rank: joined.region for rank, joined in found.items()}
        return {rank: joined.steps for rank, joined in found.items()}


@pytest.fixture
def remote(given: NodeGroup) -> Iterator[RemoteRanks]:
    made = RemoteRanks(given)
    yield made
    for channel in made.channels:
        channel.close()


def test_listener_all_remote_ranks_join(remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup) -> None:
    links = remote.come(3, 2)
    channels = remote.gathered(node_listener)
    assert sorted(channels) == [2, 3]
    for link, rank in zip(links, (3, 2), strict=True):
        link.steps.send(ChannelKind.READY, b"x" * 100_000)
        assert bytes(channels[rank].expect(ChannelKind.READY)[0]) == b"x" * 100_000
        assert link.host == OTHER_HOST
        near = remote.regions[rank].into_socket()
        with near:
            link.region.sendall(b"to rank 0")
            near.sendall(b"to the rank")
            assert near.recv(100) == b"to rank 0"
            assert link.region.recv(100) == b"to the rank"


def test_listener_after_gather_refuses_connections(
    remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup
) -> None:
    remote.come(2, 3)
    remote.gathered(node_listener)
    node_listener.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((given.host, given.port))


def test_listener_connection_between_gather_and_close_is_refused(
    remote: RemoteRanks, node_listener: NodeListener
) -> None:
    remote.come(2, 3)
    remote.gathered(node_listener)
    with pytest.raises(RankLost):
        remote.connect(2, Purpose.STEPS)


def test_listener_group_mismatch_is_refused(node_listener: NodeListener, given: NodeGroup) -> None:
    with pytest.raises(ConfigError, match="of 6 ranks over 2 nodes"):
        connect_to_rank_0(replace(given, size=6), 3, None)
    with pytest.raises(ConfigError, match="rank 1 is of rank 0's own node"):
        connect_to_rank_0(given, 1, None)


def test_ranks_of_other_revision_retry_until_their_group_listens(
    given: NodeGroup, heartbeats: HeartbeatServer, rejected: threading.Semaphore
) -> None:
    node_listener = NodeListener(replace(given, revision="new"), heartbeats.serve)
    old = replace(given, revision="old")
    for other in (old, replace(old, size=6)):  # the roll-out may be of another size
        with pytest.raises(RankLost):
            joining._open_link(other, 2, None, other.open_tls())
        assert rejected.acquire(timeout=WAIT_S)
    for known in ("new", ""):  # nobody may have said it
        same = RemoteRanks(replace(given, revision=known))
        assert same.connect(2, Purpose.STEPS)
        same.channels[0].close()
    node_listener.close()


def test_ranks_of_another_version_retry_until_versions_match(
    node_listener: NodeListener,
    given: NodeGroup,
    rejected: threading.Semaphore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = JoiningRank(rank=2, size=4, num_nodes=2, purpose=Purpose.STEPS, software="1.9")
    assert "1.9, rank 0 2.0" in (temporary_refusal(old, revision="", software="2.0") or "")
    monkeypatch.setattr(listener_module, "installed_version", lambda: "2.0")
    monkeypatch.setattr(joining, "installed_version", lambda: "1.9")
    with pytest.raises(RankLost):
        joining._open_link(given, 2, None, given.open_tls())
    assert rejected.acquire(timeout=WAIT_S)
    for known in ("2.0", ""):  # a checkout does not tell
        monkeypatch.setattr(joining, "installed_version", lambda known=known: known)
        link = joining._open_link(given, 2 if known else 3, None, given.open_tls())
        link.steps.close()
        link.region.close()
        link.pulse.close()


def test_rank_with_wrong_secret_is_rejected_without_ending_group(node_listener: NodeListener, given: NodeGroup) -> None:
    other = replace(given, secret=b"another secret !")
    with pytest.raises(RankLost, match="does not know this cluster's secret"):
        joining._open_link(other, 2, None, other.open_tls())


@pytest.mark.parametrize(
    ("kind", "answer", "reason"),
    [
        (ChannelKind.CHALLENGE, b'{"nonce": "00", "proof": "00"}', "does not know this cluster's secret"),
        (ChannelKind.CHALLENGE, b'{"nonce": "\\ud800", "proof": "\xc3\xa9"}', "does not know this cluster's secret"),
        (ChannelKind.CHALLENGE, b"[" * 4000, "malformed handshake message"),
        (ChannelKind.REFUSED, b"go home", "rejected by an unauthenticated peer"),
    ],
)
def test_handshake_false_leader_is_refused_without_ending_ranks(
    kind: ChannelKind, answer: bytes, reason: str, given: NodeGroup
) -> None:
    with socket.create_server((given.host, 0)) as server, ThreadPoolExecutor(1) as threads:
        there = replace(given, port=server.getsockname()[1], tls=None)
        coming = threads.submit(joining._open_link, there, 2, None, None)
        sock, _ = server.accept()
        channel = RankChannel(sock, "stranger", carries_descriptors=False)
        channel.expect(ChannelKind.HELLO)
        channel.send(kind, answer)
        with pytest.raises(RankLost, match=reason):
            coming.result(timeout=WAIT_S)
        channel.close()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (
            ChannelKind.HELLO,
            b'{"rank": Infinity, "size": 4, "num_nodes": 2, "version": 2, "purpose": "steps", "token": ""}',
        ),
        (ChannelKind.HELLO, b"[" * 4000),
        (ChannelKind.REFUSED, b"go home"),
    ],
)
def test_listener_malformed_hello_is_rejected_with_a_reason(
    kind: ChannelKind, content: bytes, given: NodeGroup, heartbeats: HeartbeatServer, rejected: threading.Semaphore
) -> None:
    node_listener = NodeListener(replace(given, tls=None), heartbeats.serve)
    with socket.create_connection((given.host, given.port)) as sock:
        RankChannel(sock, "door", carries_descriptors=False).send(kind, content)
        assert rejected.acquire(timeout=WAIT_S)
    node_listener.close()


def test_handshake_man_in_the_middle_without_secret_is_refused(
    node_listener: NodeListener, given: NodeGroup, authority: Authority, tmp_path: Path
) -> None:
    own = tmp_path / "between"
    own.mkdir()
    tls = MutualTls(authority.issue(own))

    def pass_on(server: socket.socket) -> None:
        sock, _ = server.accept()
        with tls.server.wrap_socket(sock, server_side=True) as follower:
            onward = socket.create_connection((given.host, given.port), WAIT_S)
            with tls.client.wrap_socket(onward) as leader:
                heard, upstream = (
                    RankChannel(end, "end", carries_descriptors=False, most_bytes=4096) for end in (follower, leader)
                )
                for source, sink in ((heard, upstream), (upstream, heard), (heard, upstream), (upstream, heard)):
                    message = source.receive()
                    if message is None:
                        return
                    sink.send(message[0], bytes(message[1]))

    with socket.create_server((given.host, 0)) as server, ThreadPoolExecutor(1) as threads:
        server.settimeout(WAIT_S)
        between = threads.submit(pass_on, server)
        there = replace(given, port=server.getsockname()[1])
        with pytest.raises(RankLost, match="does not know this cluster's secret, or the connection is intercepted"):
            joining._connect(there, 2, None, there.open_tls(), Purpose.STEPS, "")
        between.result(timeout=WAIT_S)


def test_listener_slow_caller_is_closed_at_deadline(
    given: NodeGroup, heartbeats: HeartbeatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_HANDSHAKE_S", 0.2)
    node_listener = NodeListener(replace(given, tls=None), heartbeats.serve)
    with socket.create_connection((given.host, given.port)) as sock:
        sock.settimeout(0.05)
        sock.sendall(struct.pack("<BI", ChannelKind.HELLO, 4000))
        left = 400  # bytes, each well within the time of one read
        while left:
            left -= 1
            try:
                sock.sendall(b"x")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        assert left
    node_listener.close()


def test_listener_one_address_cannot_take_all_slots(
    remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_HANDSHAKE_S", 600.0)

    def silent() -> socket.socket:
        return socket.create_connection((given.host, given.port), WAIT_S, source_address=("127.0.0.9", 0))

    with silent(), silent(), silent() as third:
        assert third.recv(1) == b"", "turned away at once: two ranks are to come"
        remote.come(2, 3)
        assert sorted(remote.gathered(node_listener)) == [2, 3]


@pytest.mark.parametrize("stranger", ["another authority", "no TLS"])
def test_listener_certificate_of_other_authority_is_refused(
    remote: RemoteRanks,
    stranger: str,
    node_listener: NodeListener,
    given: NodeGroup,
    tmp_path: Path,
    rejected: threading.Semaphore,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tls = Authority().issue(other) if stranger == "another authority" else None
    with pytest.raises((OSError, RankLost)):
        joining._open_link(replace(given, tls=tls), 2, None, replace(given, tls=tls).open_tls())
    assert rejected.acquire(timeout=WAIT_S)
    remote.come(2, 3)
    assert sorted(remote.gathered(node_listener)) == [2, 3], "who belongs here came in all the same"


def test_listener_silent_caller_delays_no_other(
    remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup
) -> None:
    with socket.create_connection((given.host, given.port)), socket.create_connection((given.host, given.port)):
        remote.come(2, 3)
        assert sorted(remote.gathered(node_listener)) == [2, 3]


def test_listener_second_connection_of_another_process_is_refused(
    remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup
) -> None:
    token = remote.connect(2, Purpose.STEPS)
    other = remote.connect(2, Purpose.STEPS)
    assert token != other
    for purpose in (Purpose.REGION, Purpose.PULSE):
        with pytest.raises(RankLost):
            remote.connect(2, purpose, token)
        remote.connect(2, purpose, other)
    remote.come(3)
    assert sorted(remote.gathered(node_listener)) == [2, 3]


def test_listener_connections_in_another_order_are_refused(
    remote: RemoteRanks, node_listener: NodeListener, given: NodeGroup
) -> None:
    token = remote.connect(2, Purpose.STEPS)
    with pytest.raises(RankLost):
        remote.connect(2, Purpose.PULSE, token)
    remote.connect(2, Purpose.REGION, token)
    with pytest.raises(RankLost):
        remote.connect(2, Purpose.REGION, token)
    remote.connect(2, Purpose.PULSE, token)
    with pytest.raises(RankLost):
        remote.connect(2, Purpose.REGION, token)
    remote.come(3)
    assert sorted(remote.gathered(node_listener)) == [2, 3]


def test_listener_rank_lost_while_joining_ends_wait(
    remote: RemoteRanks, given: NodeGroup, lost: list[RankLost]
) -> None:
    heartbeats = HeartbeatServer(lambda gone: node_listener.fail(gone))
    node_listener = NodeListener(given, heartbeats.serve)
    [link] = remote.come(2)
    link.pulse.close()
    with pytest.raises(RankLost, match=r"rank 2 at 127\.0\.0\.2:\d+ has ended"):
        remote.gathered(node_listener)
    node_listener.close()
    heartbeats.close()


def test_listener_names_missing_ranks(remote: RemoteRanks, given: NodeGroup, heartbeats: HeartbeatServer) -> None:
    node_listener = NodeListener(replace(given, join_s=0.0), heartbeats.serve)
    with pytest.raises(RankLost, match="ranks 2, 3 have not joined within 0 s"):
        remote.gathered(node_listener)
    node_listener.close()


def test_listener_without_tls_refuses_remote_address(given: NodeGroup) -> None:
    with pytest.raises(
        ConfigError, match=r"nodes is 2: beyond this machine \(at 10.0.0.1\) that needs cluster.tls or transfer.tls"
    ):
        replace(given, host="10.0.0.1", tls=None)
    with pytest.raises(ConfigError, match=r"needs transfer.isolated_network: true"):
        replace(given, host="decode-0.decode")
    there = replace(given, host="decode-0.decode", isolated_network=True)
    assert NodeGroup.from_json(there.to_json()) == there


def test_node_group_spreads_ranks_evenly_or_is_refused(given: NodeGroup) -> None:
    assert list(given.ranks_of(1)) == list(given.elsewhere) == [2, 3]
    for node in (0, 2):
        with pytest.raises(ConfigError, match=rf"node must be in \[1, 1\], got {node}"):
            given.ranks_of(node)
    with pytest.raises(ConfigError, match="5 ranks cannot be spread evenly over 2 nodes"):
        replace(given, size=5)
