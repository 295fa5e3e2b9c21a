"""Digests by which equal requests are known."""

from router.types.request_digest import request_digest
from tandem.values.sampling import SamplingParams


def test_request_digest_differs_between_requests() -> None:
    parts = ((1, 2), "a", None, True)
    others = [((1,), 2, "a", None, True), ((1, 2), "a"), ((1, 2), 2, "a"), ((2, 1), *parts[1:]), ((1, 258), *parts[1:])]
    assert request_digest(*parts) == request_digest([1, 2], *parts[1:])
    assert len({request_digest(*parts), *(request_digest(*other) for other in others)}) == 6


def test_request_digest_of_sampling_is_that_of_earlier_versions() -> None:
    """Another router, perhaps of the version before, may have begun the stream that a client continues."""
    sampling = SamplingParams(max_tokens=7, temperature=0.5, logit_bias={3: 1.0})
    assert request_digest(range(100), sampling, 1).hex() == "f29c1b3f85ebea5cb880147d3c990bb1"
