"""Other routers' loads: each request counts once, and a dead router's not at all."""

from random import Random

import pytest

from router.fleet.session_wire import hello_from_pb
from router.types.worker_view import WorkerKey, WorkerLoad
from router.workers.booking import Booking
from router.workers.peer_load import MAX_REMEMBERED, NO_PEERS, PeerLoads, PeerShare
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.cluster_state.entries import Process, RouterLoad, Share
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation, WorkerId
from tests.support.fake_worker import FakeWorker

ME = WorkerKey(WorkerId("d0"), Incarnation(1))
A, B = Incarnation(11), Incarnation(12)


def share(report: int, backlog: int, num: int, since: int = 0, num_since: int = 0, key: WorkerKey = ME) -> Share:
    return Share(
        process=Process(*key),
        report_number=report,
        backlog_tokens=backlog,
        num_requests=num,
        backlog_since=since,
        num_since=num_since,
    )


def load(router: Incarnation, sequence: int, *shares: Share) -> RouterLoad:
    return RouterLoad(router=router, sequence=sequence, shares=shares)


def test_peer_load_since_report_counts_until_newer_report() -> None:
    peers = PeerLoads(lease_s=3.0)
    assert peers.at(ME, 4) is NO_PEERS
    peers.update(load(A, 1, share(5, 100, 2, 40, 1)), 0.0)
    peers.update(load(B, 1, share(6, 30, 1, 30, 1)), 0.0)
    everything = PeerShare(backlog_tokens=130, num_requests=3, backlog_since=70, num_since=2)
    assert peers.at(ME, 4) == everything
    assert peers.at(ME, 5) == everything
    assert peers.at(ME, 6) == PeerShare(backlog_tokens=130, num_requests=3, backlog_since=30, num_since=1)
    assert peers.at(ME, 7) == PeerShare(backlog_tokens=130, num_requests=3)
    assert peers.at(WorkerKey(ME.worker_id, Incarnation(2)), 5) is NO_PEERS, "a restarted worker has none of it"


@pytest.mark.parametrize("read_ms", range(0, 150, 10))
def test_peer_load_lapses_before_the_lease_in_redis_ends(read_ms: int) -> None:
    """However late in its turn a router reads what another wrote last, at 0, and notices that it has lapsed."""
    peers = PeerLoads(lease_s=3.0, turn_s=0.15)
    peers.update(load(A, 1, share(1, 10, 1)), read_ms / 1000)
    looks_ms = range(read_ms, 3001, 150)
    gone_ms = next(now_ms for now_ms in looks_ms if peers.expire(now_ms / 1000))
    assert 2700 <= gone_ms <= 3000


def test_peer_load_unrenewed_lapses() -> None:
    peers = PeerLoads(lease_s=3.0)
    assert peers.update(load(A, 7, share(1, 10, 1)), 0.0)
    for now_s in (1.0, 2.0, 2.9):
        assert not peers.update(load(A, 7, share(1, 10, 1)), now_s), "the same again"
        assert not peers.update(load(A, 6, share(1, 99, 1)), now_s), "an older one, put back"
        assert not peers.expire(now_s)
    assert peers.at(ME, 1).backlog_tokens == 10
    assert peers.expire(3.0)
    assert peers.at(ME, 1) is NO_PEERS
    assert len(peers) == 0


def test_peer_load_replayed_old_load_is_ignored() -> None:
    peers = PeerLoads(lease_s=3.0)
    peers.update(load(A, 6, share(1, 10, 1)), 0.0)
    peers.update(load(A, 7, share(1, 20, 1)), 0.0)
    peers.update(load(B, 3, share(1, 30, 1)), 0.0)
    peers.remove(B)
    assert peers.expire(3.0)
    for sequence in (5, 6, 7):
        assert not peers.update(load(A, sequence, share(1, 70_000, 30)), 4.0), "it lapsed"
    assert not peers.update(load(B, 3, share(1, 70_000, 30)), 4.0), "it left"
    assert peers.at(ME, 1) is NO_PEERS
    assert peers.update(load(A, 8, share(1, 40, 1)), 5.0), "it was away only"
    assert peers.at(ME, 1).backlog_tokens == 40


def test_peer_load_remembered_routers_are_bounded() -> None:
    peers = PeerLoads(lease_s=3.0)
    peers.update(load(Incarnation(1), 1), 0.0)
    for number in range(2, MAX_REMEMBERED + 2):
        peers.update(load(Incarnation(number), 1), 0.0)
        peers.update(load(Incarnation(1), number), 0.0)
    assert not peers.update(load(Incarnation(1), 1), 0.0), "one that is heard of again and again is"
    assert len(peers._sequences) == MAX_REMEMBERED


def test_peer_load_of_departed_router_is_removed() -> None:
    peers = PeerLoads(lease_s=3.0)
    peers.update(load(A, 1, share(1, 10, 1)), 0.0)
    assert peers.routers == {A}
    assert peers.remove(A)
    assert not peers.remove(A)
    assert peers.at(ME, 1) is NO_PEERS


def registry_with(peers: PeerLoads) -> WorkerRegistry:
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: 0.0)
    registry.peer_loads = peers.at
    registry.joined(hello_from_pb(pb.WorkerMessage(hello=FakeWorker("d0").hello)), port=None)  # type: ignore[arg-type]
    return registry


def test_registry_counts_each_request_once() -> None:
    peers = PeerLoads(lease_s=3.0)
    registry = registry_with(peers)
    key = registry.snapshots()[0].info.key
    registry.load_changed(key, WorkerLoad(report_number=1))
    registry.assign(key, 100)
    peers.update(load(A, 1, share(1, 50, 1, 50, 1, key)), 0.0)
    registry.peers_changed()
    (seen,) = registry.snapshots()
    assert (seen.backlog_tokens, seen.num_active) == (150, 2), "ours and theirs, of which no report knows"
    registry.load_changed(key, WorkerLoad(report_number=2, num_running=2, backlog_tokens=150))
    (seen,) = registry.snapshots()
    assert (seen.backlog_tokens, seen.num_active) == (150, 2), "the report has both: theirs is not added"
    peers.update(load(A, 2, share(2, 70, 2, 20, 1, key)), 0.0)
    registry.peers_changed()
    (seen,) = registry.snapshots()
    assert (seen.backlog_tokens, seen.num_active) == (170, 3)
    peers.remove(A)
    registry.peers_changed()
    (seen,) = registry.snapshots()
    assert (seen.backlog_tokens, seen.num_active) == (150, 2), "what is left of a dead router, the worker tells"


def test_registry_in_flight_leaves_out_idle_workers() -> None:
    registry = registry_with(PeerLoads(lease_s=3.0))
    key = registry.snapshots()[0].info.key
    assert registry.in_flight() == ()
    registry.load_changed(key, WorkerLoad(report_number=4))
    sent = registry.assign(key, 64)
    assert registry.in_flight() == (share(4, 64, 1, 64, 1, key),)
    registry.load_changed(key, WorkerLoad(report_number=5, backlog_tokens=64, num_running=1))
    assert registry.in_flight() == (share(5, 64, 1, 0, 0, key),)
    sent.end()
    assert registry.in_flight() == ()


def test_registries_of_several_routers_converge() -> None:
    """One worker, three routers, messages in any order: counts never exceed what exists or existed."""
    for seed in range(40):
        rng = Random(seed)
        peers = {i: PeerLoads(lease_s=1e9) for i in range(3)}
        routers = {i: registry_with(peers[i]) for i in peers}
        key = routers[0].snapshots()[0].info.key
        under_way: list[Booking] = []
        report = 0
        for step in range(80):
            mine = rng.randrange(3)
            if rng.random() < 0.6:
                under_way.append(routers[mine].assign(key, rng.randrange(1, 100)))
            if under_way and rng.random() < 0.3:
                under_way.pop(rng.randrange(len(under_way))).end()
            if rng.random() < 0.3:
                report += 1
                reported = WorkerLoad(
                    report_number=report,
                    num_running=len(under_way),
                    backlog_tokens=sum(sent.tokens for sent in under_way),
                )
                for registry in routers.values():
                    registry.load_changed(key, reported)
                for i, registry in routers.items():
                    for j in routers.keys() - {i}:
                        peers[j].update(load(Incarnation(i + 1), step + 1, *registry.in_flight()), 0.0)
                for registry in routers.values():
                    registry.peers_changed()
                for registry in routers.values():
                    (seen,) = registry.snapshots()
                    assert seen.backlog_tokens == sum(sent.tokens for sent in under_way), (seed, step)
                    assert seen.num_active == len(under_way), (seed, step)
