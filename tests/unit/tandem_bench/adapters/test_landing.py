"""How requests for adapters landed is followed from decisions alone."""

from collections import Counter
from random import Random

from tandem_bench.adapters.landing import Landing, LeastRecentlyUsed, landing, num_misses, zipf_draws


def test_least_recently_used_keeps_the_last_names() -> None:
    cache = LeastRecentlyUsed(2)
    assert [cache.use(name) for name in "abacb"] == [False, False, True, False, False]
    assert ("a" in cache, "b" in cache, "c" in cache) == (False, True, True)


def test_landing_counts_only_requests_whose_adapter_was_somewhere() -> None:
    placed = [("a", "w1"), ("a", "w1"), ("a", "w2"), ("b", "w2"), ("a", "w2"), ("c", "w2"), ("b", "w1")]
    # a and b are new once each, c is new; b's second request goes where b is not, and w2 has evicted it by then.
    assert landing(placed, resident=8) == Landing(num_resident=4, num_landed=2)
    assert landing(placed, resident=1) == Landing(num_resident=3, num_landed=1)


def test_num_misses_of_one_cache() -> None:
    assert num_misses("abcabc", room=3) == 3
    assert num_misses("abcabc", room=2) == 6


def test_zipf_draws_follow_the_law() -> None:
    found = Counter(zipf_draws(["a", "b", "c", "d"], 20_000, Random(3)))
    assert [round(found[name] / found["a"], 1) for name in "abcd"] == [1.0, 0.5, 0.3, 0.2]
