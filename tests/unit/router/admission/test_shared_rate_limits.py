"""Rate limits shared by several routers: what one admits for a tenant counts once at all of them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.rate_limits import RECENT_S, LimitUsage, RateLimiter, RateLimitGrant
from router.admission.shared_rate_limits import SharedRateLimits, tenant_tags
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import Overloaded
from tandem.values.ids import Incarnation

TAG_OF = tenant_tags(b"a secret of the cluster")
TENANTS = ("a", "b", "free")


class Routers:
    """Routers with one clock."""

    def __init__(self, count: int, **limits: int) -> None:
        self.now_s = 0.0
        config = LimitsConfig(tenants={tenant: TenantLimits(**limits) for tenant in ("a", "b")})
        self.limiters = [RateLimiter(config, clock=lambda: self.now_s) for _ in range(count)]
        self.all = [SharedRateLimits(limiter, tenants=TENANTS, tag_of=TAG_OF) for limiter in self.limiters]

    def exchange(self, sender: int, receiver: int) -> None:
        self.all[receiver].apply_remote(Incarnation(sender + 1), self.all[sender].tallies())

    def exchange_all(self) -> None:
        for sender in range(len(self.all)):
            for receiver in range(len(self.all)):
                if sender != receiver:
                    self.exchange(sender, receiver)

    def leave(self, sender: int) -> None:
        for receiver in self.all:
            receiver.keep({Incarnation(other + 1) for other in range(len(self.all)) if other != sender})


def test_shared_limits_count_requests_of_other_routers() -> None:
    routers = Routers(3, requests_per_minute=10)
    routers.exchange_all()
    for index in (0, 1):
        for _ in range(5):
            routers.limiters[index].admit("a", 1.0)
    routers.limiters[2].admit("b", 1.0)
    routers.exchange_all()
    routers.exchange_all()
    for limiter in routers.limiters:
        with pytest.raises(Overloaded, match="requests_per_minute") as refused:
            limiter.admit("a", 1.0)
        assert refused.value.retry_after_s == pytest.approx(6.0)
        limiter.admit("b", 1.0)
    routers.now_s = 6.0
    routers.limiters[0].admit("a", 1.0)


def test_shared_limits_count_remote_requests_until_router_leaves() -> None:
    routers = Routers(2, concurrent_requests=3)
    grants = [routers.limiters[0].admit("a", 1.0) for _ in range(2)]
    routers.exchange(0, 1)  # also of a router that is heard of for the first time
    here = routers.limiters[1].admit("a", 1.0)
    with pytest.raises(Overloaded, match="concurrent_requests"):
        routers.limiters[1].admit("a", 1.0)
    routers.limiters[0].settle(grants[0], 1.0)
    routers.exchange(0, 1)
    again = routers.limiters[1].admit("a", 1.0)
    with pytest.raises(Overloaded, match="concurrent_requests"):
        routers.limiters[1].admit("a", 1.0)
    routers.leave(0)
    routers.limiters[1].admit("a", 1.0)
    for grant in (here, again):
        routers.limiters[1].settle(grant, 1.0)


def level(limiter: RateLimiter, tenant: str, most: int) -> float:
    """Tokens that a tenant may still have."""
    bucket = limiter._account(tenant).tokens_bucket(limiter._clock())
    assert bucket is not None
    return most - bucket.wait_s(float(most), limiter._clock()) * most / 60.0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 80))
def test_shared_limits_accounts_converge_to_one(seed: int, steps: int) -> None:
    rng, most = Random(seed), 10_000_000
    routers = Routers(3, tokens_per_minute=most)
    routers.exchange_all()
    live: list[tuple[int, RateLimitGrant]] = []
    used = dict.fromkeys(TENANTS, 0)
    for _ in range(steps):
        index, action = rng.randrange(3), rng.choice(("admit", "admit", "settle", "cancel", "exchange"))
        if action == "admit":
            tenant = rng.choice(TENANTS)
            live.append((index, routers.limiters[index].admit(tenant, float(rng.randrange(1000)))))
        elif action == "exchange":
            # Any of them, any number of times: what is not sent now is sent later.
            routers.exchange(index, rng.choice([other for other in range(3) if other != index]))
        elif live:
            owner, grant = live.pop(rng.randrange(len(live)))
            tokens = rng.randrange(1000) if action == "settle" else 0
            if action == "settle":
                routers.limiters[owner].settle(grant, float(tokens))
            else:
                routers.limiters[owner].cancel(grant)
            used[grant.tenant] += tokens
    for owner, grant in live:
        routers.limiters[owner].settle(grant, 7.0)
        used[grant.tenant] += 7
    routers.exchange_all()
    for limiter in routers.limiters:
        for tenant in ("a", "b"):
            assert level(limiter, tenant, most) == pytest.approx(most - used[tenant])
            assert limiter.num_elsewhere(tenant) == limiter.num_inflight(tenant) == 0


def test_shared_limits_tallies_restart_with_new_epoch() -> None:
    routers = Routers(2, requests_per_minute=10)
    routers.exchange_all()
    routers.limiters[0].settle(routers.limiters[0].admit("a", 1.0), 1.0)
    routers.exchange_all()
    routers.now_s = RECENT_S + 1.0
    assert routers.all[0].tallies() == ()
    for _ in range(9):
        routers.limiters[0].admit("a", 1.0)
    routers.exchange_all()  # nobody heard that it was silent in between
    (tally,) = routers.all[0].tallies()
    assert (tally.requests, tally.epoch, tally.num_inflight) == (9, 2, 9)
    routers.limiters[1].admit("a", 1.0)
    with pytest.raises(Overloaded):
        routers.limiters[1].admit("a", 1.0)


def test_shared_tallies_hide_tenant_names_and_cover_limited_ones() -> None:
    routers = Routers(2, requests_per_minute=10)
    for tenant in TENANTS:
        routers.limiters[0].admit(tenant, 1.0)
    tags = {tally.tenant for tally in routers.all[0].tallies()}
    assert tags == {TAG_OF("a"), TAG_OF("b")}
    assert TAG_OF("a") != tenant_tags(b"the secret of another")("a")


def test_shared_limits_unknown_tenants_are_ignored() -> None:
    routers = Routers(2, requests_per_minute=10)
    unrelated = SharedRateLimits(routers.limiters[1], tenants=("x",), tag_of=TAG_OF)
    routers.limiters[0].admit("a", 1.0)
    for _ in range(2):
        unrelated.apply_remote(Incarnation(1), routers.all[0].tallies())
    assert unrelated.limiter.num_elsewhere("a") == 0


class Host:
    """A host's account, as its processes 1 and 2 see it."""

    def __init__(self, *, is_first: bool) -> None:
        self._is_first = is_first

    def routers(self) -> frozenset[Incarnation]:
        return frozenset((Incarnation(1), Incarnation(2)))

    def is_first(self) -> bool:
        return self._is_first


def on_one_host(usage: LimitUsage, *, is_first: bool) -> SharedRateLimits:
    config = LimitsConfig(default=TenantLimits(requests_per_minute=10, concurrent_requests=9))
    limiter = RateLimiter(config, clock=lambda: 0.0, usage_of=lambda _: usage)
    return SharedRateLimits(limiter, tenants=TENANTS, tag_of=TAG_OF, host=Host(is_first=is_first))


def test_shared_limits_remote_usage_counts_once_per_host() -> None:
    usage, elsewhere = LimitUsage(), Routers(1, requests_per_minute=10)
    here = [on_one_host(usage, is_first=True), on_one_host(usage, is_first=False)]
    for num_requests in (0, 4):
        for _ in range(num_requests):
            elsewhere.limiters[0].admit("a", 1.0)
        for each in here:
            each.apply_remote(Incarnation(3), elsewhere.all[0].tallies())
    assert [each.limiter.num_elsewhere("a") for each in here] == [4, 4]
    with usage:
        assert usage.requests is not None
        assert usage.requests.level == 6.0


def test_shared_limits_own_hosts_tallies_are_ignored() -> None:
    usage = LimitUsage()
    here = [on_one_host(usage, is_first=True), on_one_host(usage, is_first=False)]
    here[1].apply_remote(Incarnation(1), here[0].tallies())
    here[0].limiter.admit("a", 1.0)
    here[1].apply_remote(Incarnation(1), here[0].tallies())
    assert here[1].limiter.num_elsewhere("a") == 0
    with usage:
        assert usage.requests is not None
        assert usage.requests.level == 9.0
