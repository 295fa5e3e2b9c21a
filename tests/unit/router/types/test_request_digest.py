"""Digests by which equal requests are known."""

from router.types.request_digest import request_digest


def test_request_digest_differs_between_requests() -> None:
    parts = ((1, 2), "a", None, True)
    others = [((1,), 2, "a", None, True), ((1, 2), "a"), ((1, 2), 2, "a"), ((2, 1), *parts[1:]), ((1, 258), *parts[1:])]
    assert request_digest(*parts) == request_digest([1, 2], *parts[1:])
    assert len({request_digest(*parts), *(request_digest(*other) for other in others)}) == 6
