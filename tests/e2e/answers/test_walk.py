"""A chat request's path through a live cluster stays short."""

from tests.walk.__main__ import follow
from tests.walk.ways import DECODE_SIDE, MOST_OBJECTS, MOST_STAYS, PREFILL_SIDE, REQUEST, walk


async def test_walk_of_a_chat_request_stays_within_its_bounds(tmp_path):
    calls = await follow(tmp_path)
    request = walk(calls[REQUEST.name])
    files = [stay.file for stay in request.stays]
    assert len(files) <= MOST_STAYS, files
    assert request.num_objects <= MOST_OBJECTS, request.objects
    assert files[-1].startswith("router/fleet/"), "it ends where the Submit is written"
    assert {"ClientRequest", "RoutedRequest", "Assignment", "SubmitOrder"} <= request.objects.keys()
    for side in (DECODE_SIDE, PREFILL_SIDE):
        assert "Request" in walk(calls[side.name]).objects, "the engine's own"
