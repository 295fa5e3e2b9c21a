"""A peer's expected rate: its own, its transport's or the overall one; and its expiry."""

import pytest

from kv_transfer.session.peer_rates import PRIOR_BYTES_PER_S, PeerRates
from tandem.values.ids import Incarnation

LIFE = Incarnation(1)
MINUTES = 60.0


class World:
    """Rates and a clock; chunks take their time on it."""

    def __init__(self) -> None:
        self.rates = PeerRates()
        self.now = 1000.0

    def observe(
        self, peer: str, transport: str, num_bytes: int, seconds: float, *, times: int = 1, life: Incarnation = LIFE
    ) -> None:
        for _ in range(times):
            self.rates.observe(peer, life, transport, num_bytes=num_bytes, seconds=seconds, now=self.now)

    def of(self, peer: str, transport: str = "", *, life: Incarnation = LIFE) -> float:
        return self.rates.bytes_per_s(peer, life, transport, now=self.now)


@pytest.fixture
def world() -> World:
    return World()


def test_peer_rates_are_kept_per_peer(world: World) -> None:
    assert world.of("a", "tcp") == 0.0
    for _ in range(100):
        world.observe("a", "tcp", 1000, 1.0)
        world.observe("b", "shm", 9000, 1.0)
    assert round(world.of("a", "tcp")) == 1000
    assert round(world.of("b")) == 9000
    assert round(world.of("c", "tcp")) == 1000
    assert round(world.of("c", "shm")) == 9000
    assert world.of("c", "nixl") == 0.0
    assert 1000 < world.of("c") < 9000


def test_peer_rates_write_of_unknown_time_is_ignored(world: World) -> None:
    world.observe("a", "tcp", 1000, 0.0)
    assert world.of("a", "tcp") == 0.0
    world.observe("b", "tcp", 500, 1.0)
    assert world.of("a", "tcp") == 500.0


def test_peer_rates_idle_peers_are_forgotten(world: World) -> None:
    for number in range(2000):
        world.observe(f"peer {number}", "tcp" if number else "shm", 10 if number else 1000, 1.0)
        world.observe("often", "tcp", 77, 1.0)
    assert world.of("peer 0", "none") == 0.0
    assert round(world.of("often", "none")) == 77


def test_peer_rates_one_stall_counts_little_several_fully(world: World) -> None:
    world.observe("a", "tcp", 1_000_000, 1e-3, times=200)
    world.observe("a", "tcp", 1_000_000, 6.0)
    assert world.of("a") > 0.6e9
    assert world.of("new", "tcp") > 0.6e9, "its transport is not to blame"
    world.observe("a", "tcp", 1_000_000, 6.0, times=100)
    assert world.of("a") == pytest.approx(1e6 / 6, rel=0.05)


def test_peer_rates_first_chunk_is_compared_with_transport_rate(world: World) -> None:
    world.observe("a", "tcp", 1_000_000, 1e-3, times=200)
    world.observe("b", "tcp", 1_000_000, 6.0)
    assert world.of("b") == pytest.approx(1e9 / 8)


def test_peer_rates_slow_peer_is_tried_again_one_request_at_a_time(world: World) -> None:
    for peer in ("other", "slow"):
        world.observe(peer, "tcp", 1_000_000, 1e-3, times=200)
    world.observe("slow", "tcp", 1_000_000, 10.0, times=100)
    slow = world.of("slow")
    assert slow < 1e6
    world.now += 1.0
    assert world.of("slow") < 2 * slow
    world.now += 5 * MINUTES
    assert world.of("slow") > 0.5e9, "its rate is measured only when it is used"
    assert world.of("new", "tcp") > 0.5e9, "as may others through the same"
    world.rates.on_request("slow", LIFE, world.now)
    assert world.of("slow") == pytest.approx(slow), "until it has answered nobody else tries"
    world.now += 1.0
    world.observe("slow", "tcp", 1_000_000, 1e-3)
    assert world.of("slow") > 0.5e9, "what it did long ago counts no more"
    world.rates.on_request("slow", LIFE, world.now)
    world.now += 1.0
    world.observe("slow", "tcp", 1_000_000, 10.0, times=40)
    assert world.of("slow") < 1e6


def test_peer_rates_idle_peer_leans_towards_transport_rate(world: World) -> None:
    world.observe("slow", "tcp", 1000, 1.0, times=100)
    world.now += 5 * MINUTES
    world.observe("other", "tcp", 1_000_000, 1.0, times=200)
    assert world.of("slow") == pytest.approx(1e6, rel=0.05)
    world.now += 60 * MINUTES
    assert world.of("slow") == world.of("other") == pytest.approx(PRIOR_BYTES_PER_S)


def test_peer_rates_restarted_peer_starts_anew(world: World) -> None:
    world.observe("b", "tcp", 1_000_000, 1e-3, times=200)
    world.observe("a", "shm", 1000, 1.0, times=100)
    again = Incarnation(2)
    assert world.of("a") == pytest.approx(1000)
    assert world.of("a", "tcp", life=again) == pytest.approx(1e9)
    world.rates.on_request("a", again, world.now)
    world.observe("a", "tcp", 2_000_000, 1e-3, life=again)
    assert world.of("a", life=again) == pytest.approx(2e9)
    world.observe("a", "tcp", 1_000_000, 1e-3, times=5, life=again)
    assert world.of("a", life=again) > 1e9
